//! `config.json` of a SmolVLM2 checkpoint, as checked sizes.
//!
//! Published files leave out sizes of the vision tower that are their class's defaults; those are read as
//! Transformers reads them. Everything that the code here cannot honour is refused by field.

use std::path::Path;

use serde_json::Value;

use crate::{
    joint::{FileLocation, JointOutline, SiglipSizes, StreamShape, outline::NamedShape},
    pretrained::{config_file, error::ModelError, fields::Fields, pictures::PatchShape},
};

/// Added to the variance in the tower's norms where the file says nothing.
const VISION_EPS: f64 = 1e-6;

/// `config.json`, checked.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SmolVlmConfig {
    /// Decoder layers.
    pub layer: StreamShape,
    /// How many the whole model has.
    pub layers: usize,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// The id that stands for a token of an image.
    pub image_token: u32,
    /// The tower.
    pub vision: SiglipSizes,
    /// Side of the square of patches that becomes one token.
    pub shuffle: usize,
}

impl SmolVlmConfig {
    /// Reads `config.json` of a model directory.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let (path, json) = config_file::read(dir)?;
        Self::from_json(&path, &json)
    }

    fn from_json(path: &Path, json: &Value) -> Result<Self, ModelError> {
        let root = Fields::new(path, json)?;
        root.expect_pretrained("a SmolVLM2 checkpoint")?;
        root.expect_str("model_type", "smolvlm")?;
        let section = |name| {
            root.object(name)?
                .ok_or_else(|| root.error(name, "missing; use the checkpoint's own config.json"))
        };
        let (text, tower) = (section("text_config")?, section("vision_config")?);
        let layer = layer(&text)?;
        let vision = vision(&tower)?;
        let shuffle = root.uint("scale_factor")?.unwrap_or(2);
        root.divides("scale_factor", shuffle, "patches of a side of an image", vision.patches())?;
        let (layers, vocab_size) = (text.size("num_hidden_layers")?, text.size("vocab_size")?);
        // The default of Transformers' class.
        let image_token = root.uint("image_token_id")?.unwrap_or(128_257);
        let image_token = u32::try_from(image_token)
            .map_err(|_| root.error("image_token_id", format!("{image_token}; expected a token's id")))?;
        Ok(Self { layer, layers, vocab_size, image_token, vision, shuffle })
    }

    /// The same for a model that lies in a policy's file.
    pub fn outline(&self, dir: &Path, within: FileLocation<'_>) -> Result<JointOutline, ModelError> {
        let layers = within.layers.unwrap_or(self.layers);
        if layers > self.layers {
            let problem = format!(
                "{}, but the policy has {layers} layers; use the model that it was made from",
                self.layers
            );
            let path = dir.join("config.json");
            return Err(ModelError::Config { path, field: "text_config.num_hidden_layers".into(), problem });
        }
        Ok(JointOutline {
            layer: self.layer,
            layers,
            vocab_size: self.vocab_size,
            image_token: self.image_token,
            image_side: self.vision.side,
            patches: PatchShape { patch: self.vision.patch, merge: self.shuffle, frames: 1 },
            tensors: self.tensors(within.prefix, layers),
        })
    }

    /// Every tensor of `SmolVLMForConditionalGeneration` with so many decoder layers.
    fn tensors(&self, prefix: &str, layers: usize) -> Vec<NamedShape> {
        let d = self.layer.width;
        let mut list: Vec<NamedShape> = self.vision.tensors(&format!("{prefix}model.vision_model"));
        let mut add = |name: &str, shape: &[usize]| list.push((format!("{prefix}{name}"), shape.to_vec()));
        let shuffled = self.vision.width * self.shuffle * self.shuffle;
        add("model.connector.modality_projection.proj.weight", &[d, shuffled]);
        add("model.text_model.embed_tokens.weight", &[self.vocab_size, d]);
        for layer in 0..layers {
            let tensors = self.layer.tensors(&format!("model.text_model.layers.{layer}"));
            tensors.iter().for_each(|(name, shape)| add(name, shape));
        }
        add("model.text_model.norm.weight", &[d]);
        add("lm_head.weight", &[self.vocab_size, d]);
        list
    }
}

fn layer(text: &Fields<'_>) -> Result<StreamShape, ModelError> {
    text.expect_str("model_type", "llama")?;
    text.expect_str("hidden_act", "silu")?;
    for bias in ["attention_bias", "mlp_bias"] {
        if text.bool(bias)? == Some(true) {
            return Err(text.error(bias, "true; layers with biases are not supported"));
        }
    }
    let (width, heads) = (text.size("hidden_size")?, text.size("num_attention_heads")?);
    let kv_heads = text.uint("num_key_value_heads")?.unwrap_or(heads);
    text.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
    let head_dim = text.uint("head_dim")?.filter(|size| *size > 0).unwrap_or(width / heads);
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(text.error("head_dim", format!("{head_dim}; the rotary embedding needs an even one")));
    }
    let eps = text.positive("rms_norm_eps")?.unwrap_or(1e-6);
    Ok(StreamShape {
        width,
        heads,
        kv_heads,
        head_dim,
        inner: text.size("intermediate_size")?,
        kv_inputs: width,
        eps,
    })
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
            "{} patches along image_size {}; only powers of two are supported",
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
        let config = SmolVlmConfig::from_json("config.json".as_ref(), &published()).expect("it is read");
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
            let message =
                SmolVlmConfig::from_json("config.json".as_ref(), &json).expect_err("refused").to_string();
            assert!(message.contains(section), "{message}");
        }
    }
}
