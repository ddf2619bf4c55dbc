"""Fine-tunes a tiny, randomly initialised GPT-2 from Hugging Face transformers."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def batch(size: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Sequences that count upwards from a random number, with padding at the end."""
    start = torch.randint(vocabulary, (size, 1))
    input_ids = (start + torch.arange(length)) % vocabulary
    valid = torch.randint(length // 2, length + 1, (size, 1))
    attention_mask = (torch.arange(length) < valid).long()
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 5, args.steps)

    for step in range(args.steps):
        loss = model(**batch(4, 64, config.vocab_size)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
