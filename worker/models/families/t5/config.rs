//! `config.json` of a T5 checkpoint.

use std::path::Path;

use super::rules::RULES;
use crate::{
    pretrained::{checkpoint::Checkpoint, config_file, error::ModelError, fields::Fields},
    text_to_text::SpecialIds,
};

/// Names of `model_type` that are read. The third spelling of the family, umT5, has position biases in every
/// layer, and is not.
pub(super) const FAMILY: [&str; 2] = ["t5", "mt5"];
/// Names under which a checkpoint may keep the table that encoder and decoder share.
const TABLES: [&str; 3] = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];
/// The head, where it is a matrix of its own.
const HEAD: &str = "lm_head.weight";

/// What stands between the two products of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// `wo(relu(wi(x)))`, of the first T5.
    Relu,
    /// `wo(gelu(wi_0(x)) * wi_1(x))`, of T5 1.1 and mT5; GELU by its tanh approximation.
    GatedGelu,
}

/// Sizes and special tokens of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Width of a head; heads together need not be as wide as the stream.
    pub d_kv: usize,
    /// Inner width of a feed-forward layer.
    pub d_ff: usize,
    /// Heads of every attention.
    pub heads: usize,
    /// Blocks of the encoder.
    pub encoder_layers: usize,
    /// Blocks of the decoder.
    pub decoder_layers: usize,
    /// Buckets of relative positions, and the distance from which on all share the last one.
    pub buckets: [usize; 2],
    /// Epsilon of the norms.
    pub eps: f64,
    /// Kind of the feed-forward layers.
    pub feed_forward: FeedForward,
    /// Whether the decoder's output is scaled by `d_model^-0.5` before the head.
    pub scale_output: bool,
    /// The tensor of the embedding table.
    pub table: String,
    /// The head's own tensor; none where the head is the embedding table.
    pub head: Option<String>,
    /// Tokens that are no text.
    pub special: SpecialIds,
}

impl T5Config {
    /// Reads the `config.json` of a model directory, and from its weights' headers, where there are any, how
    /// table and head are called.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let (path, json) = config_file::read(dir)?;
        let fields = Fields::new(&path, &json)?;
        // Weights that are missing or broken are told of when they are read.
        let checkpoint = Checkpoint::open(dir, RULES).ok();
        Self::from_fields(&fields, |tensor| checkpoint.as_ref().map(|weights| weights.contains(tensor)))
    }

    /// `stored` says whether the weights have a tensor; none if there are no weights.
    fn from_fields(f: &Fields<'_>, stored: impl Fn(&str) -> Option<bool>) -> Result<Self, ModelError> {
        f.expect_pretrained("a T5 or mT5 checkpoint")?;
        let kind = f.str("model_type")?.unwrap_or_default();
        if !FAMILY.contains(&kind) {
            return Err(f.error("model_type", format!("{kind:?}; the task `seq2seq` supports t5 and mt5")));
        }
        let layers = f.size("num_layers")?;
        let vocab_size = f.size("vocab_size")?;
        let token = |field: &str, default: u32| token(f, field, default, vocab_size);
        let pad = token("pad_token_id", 0)?;
        // Of the first T5 alone the head is the table; saying so in `config.json` is what scales its output.
        let tied = f.bool("tie_word_embeddings")?.unwrap_or(kind == "t5");
        let scale = f.bool("scale_decoder_outputs")?.unwrap_or(tied);
        // Transformers 5 calls every model tied when it writes it, also those with a head of their own.
        let may_be_own = !tied || kind == "mt5" || !scale;
        if f.bool("tie_word_embeddings")? == Some(false) && stored(HEAD) == Some(false) {
            let problem = format!(
                "false, but the weights have no `{HEAD}`; download the checkpoint again, or set \
                 `tie_word_embeddings` to true if the embedding table is the head"
            );
            return Err(f.error("tie_word_embeddings", problem));
        }
        let table = TABLES.into_iter().find(|table| stored(table) == Some(true)).unwrap_or(TABLES[0]);
        Ok(Self {
            vocab_size,
            d_model: f.size("d_model")?,
            d_kv: f.size("d_kv")?,
            d_ff: f.size("d_ff")?,
            heads: f.size("num_heads")?,
            encoder_layers: layers,
            decoder_layers: f.uint("num_decoder_layers")?.unwrap_or(layers),
            buckets: buckets(f)?,
            eps: f.positive("layer_norm_epsilon")?.unwrap_or(1e-6),
            feed_forward: feed_forward(f, kind)?,
            scale_output: kind == "t5" && scale,
            table: table.into(),
            head: (may_be_own && stored(HEAD).unwrap_or(!tied)).then(|| HEAD.into()),
            special: SpecialIds {
                pad,
                eos: token("eos_token_id", 1)?,
                decoder_start: token("decoder_start_token_id", pad)?,
            },
        })
    }

    /// Width of all heads together.
    pub fn inner(&self) -> usize {
        self.heads * self.d_kv
    }
}

fn token(f: &Fields<'_>, field: &str, default: u32, vocab: usize) -> Result<u32, ModelError> {
    // Transformers takes a list of ends; the first is the one that is learned.
    let listed = f.get(field).and_then(|value| value.as_array()?.first()?.as_u64());
    let id = match listed {
        Some(id) => id as usize,
        None => f.uint(field)?.unwrap_or(default as usize),
    };
    if id >= vocab {
        return Err(f.error(field, format!("{id} is outside the vocabulary (vocab_size {vocab})")));
    }
    Ok(id as u32)
}

fn buckets(f: &Fields<'_>) -> Result<[usize; 2], ModelError> {
    let buckets = f.uint("relative_attention_num_buckets")?.unwrap_or(32);
    let distance = f.uint("relative_attention_max_distance")?.unwrap_or(128);
    if buckets < 4 || !buckets.is_multiple_of(4) {
        let problem = format!("{buckets}; expected a positive multiple of 4");
        return Err(f.error("relative_attention_num_buckets", problem));
    }
    if distance <= buckets / 2 {
        let problem = format!("{distance}; expected more than half of relative_attention_num_buckets");
        return Err(f.error("relative_attention_max_distance", problem));
    }
    Ok([buckets, distance])
}

fn feed_forward(f: &Fields<'_>, kind: &str) -> Result<FeedForward, ModelError> {
    let usual = if kind == "mt5" { "gated-gelu" } else { "relu" };
    match f.str("feed_forward_proj")?.unwrap_or(usual) {
        "relu" => Ok(FeedForward::Relu),
        "gated-gelu" => Ok(FeedForward::GatedGelu),
        other => Err(f.error("feed_forward_proj", format!("{other:?}; expected \"relu\" or \"gated-gelu\""))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(changes: &[(&str, Value)], stored: Option<&[&str]>) -> Result<T5Config, String> {
        let mut json = json!({
            "model_type": "t5", "vocab_size": 100, "d_model": 8, "d_kv": 3, "d_ff": 16, "num_layers": 2, "num_heads": 3,
        });
        for (key, value) in changes {
            json[key] = value.clone();
        }
        let stored = |tensor: &str| stored.map(|all| all.contains(&tensor));
        let fields = Fields::new(Path::new("config.json"), &json).expect("an object");
        T5Config::from_fields(&fields, stored).map_err(|error| error.to_string())
    }

    #[test]
    fn three_generations_differ_in_head_scale_and_feed_forward() {
        let first = read(&[], Some(&["shared.weight", HEAD])).expect("T5");
        assert_eq!((first.head.as_deref(), first.scale_output), (None, true));
        assert_eq!((first.feed_forward, first.decoder_layers), (FeedForward::Relu, 2));
        assert_eq!(first.special, SpecialIds { pad: 0, eos: 1, decoder_start: 0 });

        let untied = ("tie_word_embeddings", json!(false));
        let gated = ("feed_forward_proj", json!("gated-gelu"));
        let second = read(&[untied.clone(), gated, ("num_decoder_layers", json!(3))], None).expect("T5 1.1");
        assert_eq!((second.head.as_deref(), second.scale_output), (Some(HEAD), false));
        assert_eq!((second.feed_forward, second.decoder_layers), (FeedForward::GatedGelu, 3));

        let mt5 = ("model_type", json!("mt5"));
        let third = read(std::slice::from_ref(&mt5), Some(&["encoder.embed_tokens.weight"])).expect("mT5");
        assert_eq!((third.head.as_deref(), third.scale_output), (None, false));
        assert_eq!(third.table, "encoder.embed_tokens.weight");
        let own = read(&[mt5, untied], Some(&["shared.weight", HEAD])).expect("mT5");
        assert_eq!((own.head.as_deref(), own.table.as_str()), (Some(HEAD), "shared.weight"));
    }

    #[test]
    fn a_head_that_the_config_promises_must_be_there() {
        let untied = ("tie_word_embeddings", json!(false));
        for kind in ["t5", "mt5"] {
            let changes = [("model_type", json!(kind)), untied.clone()];
            let message = read(&changes, Some(&["shared.weight"])).expect_err("refused");
            assert!(
                message.contains("tie_word_embeddings") && message.contains("lm_head.weight"),
                "{message}"
            );
            assert!(read(&changes, None).is_ok(), "without weights, sizes alone are asked for");
        }
    }

    #[test]
    fn policies_and_quantised_weights_are_refused_by_what_they_are() {
        let bits = json!({"quant_method": "bitsandbytes", "load_in_4bit": true});
        for (changes, told) in [
            (
                vec![("model_type", Value::Null), ("type", json!("smolvla"))],
                "`type`: \"smolvla\" is a LeRobot policy",
            ),
            (vec![("model_type", json!("openvla"))], "`model_type`: \"openvla\" is a robot's policy"),
            (vec![("quantization_config", bits)], "quantised weights (bitsandbytes) are not supported; use"),
        ] {
            let message = read(&changes, None).expect_err("refused");
            assert!(message.contains(told), "{message}");
        }
    }

    #[test]
    fn what_is_not_read_is_refused_by_field() {
        for (key, value, told) in [
            ("model_type", json!("umt5"), "umt5"),
            ("feed_forward_proj", json!("gated-silu"), "gated-silu"),
            ("relative_attention_num_buckets", json!(6), "multiple of 4"),
            ("relative_attention_max_distance", json!(16), "more than half"),
            ("eos_token_id", json!([100, 2]), "outside the vocabulary"),
            ("d_kv", json!(0), "positive"),
        ] {
            let message = read(&[(key, value)], None).expect_err("refused");
            assert!(message.contains(key) && message.contains(told), "{message}");
        }
    }
}
