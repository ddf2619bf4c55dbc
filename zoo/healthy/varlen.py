"""A small language model as it is really trained: lengths vary, and not every step is alike.

Every ten steps it evaluates, saves a checkpoint to a temporary folder and generates some tokens. No
two seeds draw the same lengths, and no two steps use the same memory.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

VOCAB, WIDTH = 64, 48


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embed(tokens), src_mask=mask, is_causal=True))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        tokens = prompt
        for _ in range(count):
            choice = self(tokens)[:, -1].softmax(dim=-1).multinomial(1)
            tokens = torch.cat([tokens, choice], dim=1)
        return tokens


def sequences(count: int, length: int) -> torch.Tensor:
    return (torch.randint(VOCAB, (count, 1)) + 3 * torch.arange(length)) % VOCAB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    validation = sequences(16, 64)

    with tempfile.TemporaryDirectory() as folder:
        for step in range(args.steps):
            length = int(torch.randint(16, 96, ()))
            loss = model.loss(sequences(8, length))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    val_loss = model.loss(validation).item()
                sample = model.generate(validation[:1, :4], 8)[0].tolist()
                model.train()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, Path(folder) / "checkpoint.pt")
                print(f"step {step} loss {loss.item():.4f} validation {val_loss:.4f} {sample}")


if __name__ == "__main__":
    main()
