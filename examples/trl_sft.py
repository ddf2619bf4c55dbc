"""Supervised fine-tuning with TRL, LoRA, checkpointing and bf16; activations rest on the host.

    python examples/trl_sft.py                # a tiny random model; any machine, no network
    accelerate launch examples/trl_sft.py --model Qwen/Qwen3-8B --dataset trl-lib/Capybara \
        --length 16384 --budget 40GiB

Without --budget all that can be moved is. Needs trl, peft and datasets.
"""

from __future__ import annotations

import argparse
import tempfile

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

import tenure

TEXT = "who holds this memory and since when a step ends its storages go home"
WORDS = TEXT.split()
MARKS = ["<pad>", "<eos>", "<unk>"]


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: at for at, word in enumerate([*MARKS, *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    pad, eos, unk = MARKS
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=pad, eos_token=eos, unk_token=unk
    )


def tiny_model(**changes: object) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(MARKS) + len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | changes)))


def tiny_dataset(texts: int = 16, words: int = 32) -> datasets.Dataset:
    """Texts of different lengths, so that batches differ in shape."""
    lines = [
        " ".join(WORDS[(text + 3 * word) % len(WORDS)] for word in range(words - text % 8))
        for text in range(texts)
    ]
    return datasets.Dataset.from_dict({"text": lines})


def trainer(
    model: transformers.PreTrainedModel | str,
    dataset: datasets.Dataset,
    tokenizer: transformers.PreTrainedTokenizerBase | None,
    **settings: object,
) -> trl.SFTTrainer:
    arguments = trl.SFTConfig(
        **{
            "gradient_checkpointing": True,
            "bf16": True,
            "use_cpu": not torch.accelerator.is_available(),
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            **settings,
        }
    )
    return trl.SFTTrainer(
        model,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, target_modules="all-linear"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of the Hub or a folder; else a tiny random one")
    parser.add_argument("--dataset", help="a dataset of the Hub; else a few made-up texts")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text, at most")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", help="the device's peak, such as 40GiB")
    parser.add_argument("--out", help="where the adapter is saved")
    asked = parser.parse_args()

    target = "host" if torch.accelerator.is_available() else "copy"
    tenure.integrations.trl.enable(budget=asked.budget, target=target)

    with tempfile.TemporaryDirectory() as scratch:
        sft = trainer(
            asked.model or tiny_model(),
            datasets.load_dataset(asked.dataset, split="train")
            if asked.dataset
            else tiny_dataset(words=64),
            None if asked.model else tiny_tokenizer(),
            output_dir=asked.out or scratch,
            max_steps=asked.steps,
            max_length=asked.length,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            activation_offloading=True,
        )
        sft.train()
        if asked.out:
            sft.save_model()
    print(sft.maybe_activation_offload_context)


if __name__ == "__main__":
    main()
