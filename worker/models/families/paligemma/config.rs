//! `config.json` of a PaliGemma checkpoint, as checked sizes.
//!
//! Published files leave out what are their class's defaults; those are read as Transformers reads them.
//! Everything that the code here cannot honour is refused by field.

use std::path::Path;

use serde_json::Value;

use crate::{
    joint::{
        JointStyle, LayerKind, SiglipSizes, TowerDecoderSizes,
        tower_decoder::{decoder_layer, image_token, sections},
    },
    pretrained::{config_file, error::ModelError, fields::Fields},
};

/// Added to the variance in the tower's norms where the file says nothing.
const EPS: f64 = 1e-6;
/// Values of a head where the file says nothing: `GemmaConfig`'s.
const HEAD_DIM: usize = 256;
/// What its models have in common.
const STYLE: JointStyle = JointStyle {
    tower: "vision_tower.vision_model",
    connector: "multi_modal_projector.linear",
    bias: true,
    text: "language_model",
    kind: LayerKind::Gemma,
    tied: true,
};

/// Reads `config.json` of a model directory.
pub(super) fn read(dir: &Path) -> Result<TowerDecoderSizes, ModelError> {
    let (path, json) = config_file::read(dir)?;
    from_json(&path, &json)
}

fn from_json(path: &Path, json: &Value) -> Result<TowerDecoderSizes, ModelError> {
    let root = Fields::new(path, json)?;
    root.expect_pretrained("a PaliGemma checkpoint")?;
    root.expect_str("model_type", "paligemma")?;
    let [text, tower] = sections(&root)?;
    for key in ["hidden_act", "hidden_activation"] {
        // Gemma's first files say `gelu`, and mean its approximation: Transformers reads them so.
        if let Some(other) = text.str(key)?.filter(|name| !["gelu", "gelu_pytorch_tanh"].contains(name)) {
            return Err(text.error(key, format!("{other:?}; only \"gelu_pytorch_tanh\" is supported")));
        }
    }
    Ok(TowerDecoderSizes {
        layer: decoder_layer(&text, "gemma", Some(HEAD_DIM))?,
        layers: text.size("num_hidden_layers")?,
        // Rows that Transformers appends to the table are no tokens'.
        vocab_size: root.uint("_vocab_size")?.map_or_else(|| text.size("vocab_size"), Ok)?,
        // The default of Transformers' class.
        image_token: image_token(&root, &["image_token_id", "image_token_index"], 256_000)?,
        vision: vision(&tower)?,
        shuffle: 1,
        style: STYLE,
    })
}

fn vision(tower: &Fields<'_>) -> Result<SiglipSizes, ModelError> {
    tower.expect_str("hidden_act", "gelu_pytorch_tanh")?;
    if tower.bool("vision_use_head")? == Some(true) {
        return Err(tower.error("vision_use_head", "true; a pooling head is not supported"));
    }
    let vision = SiglipSizes {
        width: tower.size("hidden_size")?,
        depth: tower.size("num_hidden_layers")?,
        heads: tower.size("num_attention_heads")?,
        inner: tower.size("intermediate_size")?,
        side: tower.uint("image_size")?.unwrap_or(224),
        patch: tower.side("patch_size")?.unwrap_or(16),
        eps: tower.positive("layer_norm_eps")?.unwrap_or(EPS),
    };
    tower.divides("num_attention_heads", vision.heads, "hidden_size", vision.width)?;
    tower.divides("patch_size", vision.patch, "image_size", vision.side)?;
    Ok(vision)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pretrained::location::FileLocation;

    /// paligemma-3b-pt-224, as published.
    fn published() -> Value {
        json!({
            "model_type": "paligemma", "_vocab_size": 257_152, "image_token_index": 257_152,
            "hidden_size": 2048, "projection_dim": 2048,
            "text_config": {
                "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16_384,
                "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
                "vocab_size": 257_216
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false
            }
        })
    }

    #[test]
    fn the_published_model_has_its_parameters_and_an_image_256_tokens() {
        let config = from_json("config.json".as_ref(), &published()).expect("it is read");
        let outline =
            config.outline("".as_ref(), FileLocation { prefix: "", layers: None }).expect("all of it");
        assert_eq!(outline.parameters(), 2_923_335_408);
        assert_eq!((outline.tensors.len(), outline.image_tokens()), (603, 256));
        let more = config.outline("D".as_ref(), FileLocation { prefix: "", layers: Some(19) });
        let message = more.expect_err("it has 18").to_string();
        assert!(message.starts_with("D/config.json: `text_config.num_hidden_layers`: 18,"), "{message}");
    }

    #[test]
    fn what_is_not_read_is_refused_by_field() {
        for (section, field, value) in [
            ("text_config", "hidden_activation", json!("silu")),
            ("text_config", "attention_bias", json!(true)),
            ("text_config", "num_key_value_heads", json!(3)),
            ("vision_config", "patch_size", json!(15)),
            ("vision_config", "vision_use_head", json!(true)),
        ] {
            let mut json = published();
            json[section][field] = value;
            let message = from_json("config.json".as_ref(), &json).expect_err("refused").to_string();
            assert!(message.contains(section) && message.contains(field), "{message}");
        }
    }
}
