"""Makes the checkpoint of configs/seq2seq.yaml: pip install torch transformers sentencepiece; python3 make_tiny_t5.py

An mT5 in the published Hugging Face layout with random weights, and SentencePiece's unigram pieces of the texts beside
it (../deliveries). Versions: integration-tests/fixtures/requirements.txt.
"""

import io
import json
import pathlib

import sentencepiece
import torch
from safetensors.torch import save_file
from transformers import MT5Config, MT5ForConditionalGeneration

HERE = pathlib.Path(__file__).parent


def pieces():
    model = io.BytesIO()
    texts = (HERE / "../deliveries/pairs.csv").read_text(encoding="utf-8").splitlines()[1:]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=160, model_type="unigram", character_coverage=1.0, pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, num_threads=1, normalization_rule_name="identity", minloglevel=2,
    )
    (HERE / "spiece.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()


def main():
    torch.manual_seed(18)
    vocab = -(-pieces() // 32) * 32
    config = MT5Config(
        vocab_size=vocab, d_model=96, d_kv=16, d_ff=192, num_layers=2, num_decoder_layers=2, num_heads=6, decoder_start_token_id=0,
        dropout_rate=0.0, architectures=["MT5ForConditionalGeneration"], dtype="bfloat16",
    )
    model = MT5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and name != "shared.weight":
                weight.normal_(0, weight.shape[1] ** -0.5)
        head = torch.randn(model.shared.weight.shape) * config.d_model**-0.5
    state = {name: value for name, value in model.state_dict().items() if "embed_tokens" not in name}
    state["lm_head.weight"] = head
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    save_file(state, HERE / "model.safetensors", metadata={"format": "pt"})
    # As published: Transformers 5 itself writes `true`.
    config = {**config.to_diff_dict(), "tie_word_embeddings": False}
    (HERE / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    print(vocab, "pieces,", sum(value.numel() for value in state.values()), "parameters")


if __name__ == "__main__":
    main()
