"""Makes a small model with fixed random weights, which gives the same tokens in every process."""

from __future__ import annotations

from pathlib import Path

TEXTS = ["the quick brown fox jumps over the lazy dog", "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"]


def make_model(folder: Path, heads: int = 4, head_size: int = 32) -> None:
    """Write a Llama model of 2 layers and its tokenizer (about 1 MB); nothing is downloaded.

    A token has 8 bytes of KV cache by head and element of a head: 1 KiB by default.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_size,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        # With the default of 0.02 an answer hardly depends on the blocks before the last one.
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
