//! `config.json` of a SmolVLM2 checkpoint, as checked sizes.
//!
//! Published files leave out sizes of the vision tower that are their class's defaults; those are read as
//! Transformers reads them. Everything that the code here cannot honour is refused by field.

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
const VISION_EPS: f64 = 1e-6;
/// What its models have in common.
const STYLE: JointStyle = JointStyle {
    tower: "vision_model",
    connector: "connector.modality_projection.proj",
    bias: false,
    text: "text_model",
    kind: LayerKind::Llama,
    tied: false,
};

/// Reads `config.json` of a model directory.
pub(super) fn read(dir: &Path) -> Result<TowerDecoderSizes, ModelError> {
    let (path, json) = config_file::read(dir)?;
    from_json(&path, &json)
}

fn from_json(path: &Path, json: &Value) -> Result<TowerDecoderSizes, ModelError> {
    let root = Fields::new(path, json)?;
    root.expect_pretrained("a SmolVLM2 checkpoint")?;
    root.expect_str("model_type", "smolvlm")?;
    let [text, tower] = sections(&root)?;
    text.expect_str("hidden_act", "silu")?;
    let (layer, vision) = (decoder_layer(&text, "llama", None)?, vision(&tower)?);
    let shuffle = root.uint("scale_factor")?.unwrap_or(2);
    root.divides("scale_factor", shuffle, "image_size / patch_size =", vision.patches())?;
    let (layers, vocab_size) = (text.size("num_hidden_layers")?, text.size("vocab_size")?);
    // The default of Transformers' class.
    let image_token = image_token(&root, &["image_token_id"], 128_257)?;
    Ok(TowerDecoderSizes { layer, layers, vocab_size, image_token, vision, shuffle, style: STYLE })
}

fn vision(tower: &Fields<'_>) -> Result<SiglipSizes, ModelError> {
    tower.expect_str("hidden_act", "gelu_pytorch_tanh")?;
    let vision = SiglipSizes {
        width: tower.uint("hidden_size")?.unwrap_or(1152),
        depth: tower.uint("num_hidden_layers")?.unwrap_or(12),
        heads: tower.uint("num_attention_heads")?.unwrap_or(16),
        inner: tower.uint("intermediate_size")?.unwrap_or(3072),
        side: tower.size("image_size")?,
        patch: tower.side("patch_size")?.unwrap_or(32),
        eps: tower.positive("layer_norm_eps")?.unwrap_or(VISION_EPS),
    };
    tower.divides("num_attention_heads", vision.heads, "hidden_size", vision.width)?;
    tower.divides("patch_size", vision.patch, "image_size", vision.side)?;
    // Transformers finds a patch's position among fractions of the side, which for other numbers round.
    if !vision.patches().is_power_of_two() {
        let problem = format!(
            "{} patches per side (image_size {}); expected a power of two",
            vision.patches(),
            vision.side
        );
        return Err(tower.error("patch_size", problem));
    }
    Ok(vision)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pretrained::location::FileLocation;

    /// SmolVLM2-500M-Video-Instruct, as published.
    fn published() -> Value {
        json!({
            "model_type": "smolvlm",
            "scale_factor": 4,
            "text_config": {
                "model_type": "llama", "hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15,
                "num_key_value_heads": 5, "head_dim": 64, "intermediate_size": 2560, "vocab_size": 49280,
                "rms_norm_eps": 1e-5
            },
            "vision_config": { "hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16 }
        })
    }

    #[test]
    fn the_published_model_has_its_parameters_and_an_image_64_tokens() {
        let config = from_json("config.json".as_ref(), &published()).expect("it is read");
        let outline = |layers| {
            config.outline("".as_ref(), FileLocation { prefix: "", layers }).expect("it has as many")
        };
        assert_eq!(outline(Some(16)).parameters(), 350_165_184);
        assert_eq!(outline(None).parameters(), 350_165_184 + 16 * 9_832_320);
        assert_eq!(outline(None).image_tokens(), 64);
        let more = config.outline("D".as_ref(), FileLocation { prefix: "", layers: Some(33) });
        let message = more.expect_err("it has 32").to_string();
        assert!(message.starts_with("D/config.json: `text_config.num_hidden_layers`: 32,"), "{message}");
    }

    #[test]
    fn what_is_not_read_is_refused_by_field() {
        for (section, field, value) in [
            ("text_config", "hidden_act", json!("gelu")),
            ("text_config", "attention_bias", json!(true)),
            ("text_config", "num_key_value_heads", json!(4)),
            ("vision_config", "patch_size", json!(12)),
            ("vision_config", "image_size", json!(480)),
        ] {
            let mut json = published();
            json[section][field] = value;
            let message = from_json("config.json".as_ref(), &json).expect_err("refused").to_string();
            assert!(message.contains(section), "{message}");
        }
    }
}
