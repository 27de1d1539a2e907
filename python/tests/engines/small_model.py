"""A model of a few layers with made-up weights, for engines: a folder with a configuration and a tokenizer of
bytes. The weights are the engine's own ("dummy"), the same on every start."""

import json
import pathlib

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 512,
    "sliding_window": None,
}


def write(folder, config=None):
    """Writes a model into the folder and gives its name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = {name: number for number, name in enumerate(names)}
    words |= {f"<{number}>": number for number in range(len(words), config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "unk_token": "<unk>"}))
    return str(folder)
