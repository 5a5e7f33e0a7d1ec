//! `config.json` of a PaliGemma checkpoint, as checked sizes.
//!
//! Published files leave out what are their class's defaults; those are read as Transformers reads them.
//! Everything that the code here cannot honour is refused by field.

use std::path::Path;

use serde_json::Value;

use crate::{
    joint::{FileLocation, JointOutline, SiglipSizes, StreamShape, outline::NamedShape},
    pretrained::{config_file, error::ModelError, fields::Fields, pictures::PatchShape},
};

/// Added to the variance in norms where the file says nothing: Gemma's, and SigLIP's.
const EPS: f64 = 1e-6;
/// Values of a head where the file says nothing: `GemmaConfig`'s.
const HEAD_DIM: usize = 256;

/// `config.json`, checked.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PaliGemmaConfig {
    /// Decoder layers.
    pub layer: StreamShape,
    /// How many there are.
    pub layers: usize,
    /// Rows of the table that tokens have: those that Transformers appends to it are none.
    pub vocab_size: usize,
    /// The id that stands for a token of an image.
    pub image_token: u32,
    /// The tower.
    pub vision: SiglipSizes,
}

impl PaliGemmaConfig {
    /// Reads `config.json` of a model directory.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let (path, json) = config_file::read(dir)?;
        Self::from_json(&path, &json)
    }

    fn from_json(path: &Path, json: &Value) -> Result<Self, ModelError> {
        let root = Fields::new(path, json)?;
        root.expect_pretrained("a PaliGemma checkpoint")?;
        root.expect_str("model_type", "paligemma")?;
        let section = |name| {
            root.object(name)?
                .ok_or_else(|| root.error(name, "missing; use the checkpoint's own config.json"))
        };
        let (text, tower) = (section("text_config")?, section("vision_config")?);
        let vocab_size = match root.uint("_vocab_size")? {
            Some(rows) => rows,
            None => text.size("vocab_size")?,
        };
        let keys = ["image_token_id", "image_token_index"];
        let image = keys.into_iter().find_map(|key| root.uint(key).transpose()).transpose()?;
        // The default of Transformers' class.
        let image = image.unwrap_or(256_000);
        let image_token = u32::try_from(image)
            .map_err(|_| root.error("image_token_index", format!("{image}; expected a token's id")))?;
        Ok(Self {
            layer: layer(&text)?,
            layers: text.size("num_hidden_layers")?,
            vocab_size,
            image_token,
            vision: vision(&tower)?,
        })
    }

    /// The same for a model that lies in a policy's file.
    pub fn outline(&self, dir: &Path, within: FileLocation<'_>) -> Result<JointOutline, ModelError> {
        let layers = within.layers.unwrap_or(self.layers);
        if layers != self.layers {
            let problem = format!(
                "{}, but the policy has {layers} layers; use the model that the policy was trained from",
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
            patches: PatchShape { patch: self.vision.patch, merge: 1, frames: 1 },
            tensors: self.tensors(within.prefix),
        })
    }

    /// Every tensor of `PaliGemmaForConditionalGeneration`; the head is the table.
    fn tensors(&self, prefix: &str) -> Vec<NamedShape> {
        let (d, mut list) = (self.layer.width, Vec::new());
        list.extend(self.vision.tensors(&format!("{prefix}model.vision_tower.vision_model")));
        let mut add =
            |name: &str, shape: &[usize]| list.push((format!("{prefix}model.{name}"), shape.into()));
        add("multi_modal_projector.linear.weight", &[d, self.vision.width]);
        add("multi_modal_projector.linear.bias", &[d]);
        add("language_model.embed_tokens.weight", &[self.vocab_size, d]);
        for layer in 0..self.layers {
            let tensors = self.layer.tensors(&format!("language_model.layers.{layer}"));
            tensors.iter().for_each(|(name, shape)| add(name, shape));
        }
        add("language_model.norm.weight", &[d]);
        list
    }
}

fn layer(text: &Fields<'_>) -> Result<StreamShape, ModelError> {
    text.expect_str("model_type", "gemma")?;
    if text.bool("attention_bias")? == Some(true) {
        return Err(text.error("attention_bias", "true; layers with biases are not supported"));
    }
    for key in ["hidden_act", "hidden_activation"] {
        // Gemma's first files say `gelu`, and mean its approximation: Transformers reads them so.
        if let Some(other) = text.str(key)?.filter(|name| !["gelu", "gelu_pytorch_tanh"].contains(name)) {
            return Err(text.error(key, format!("{other:?}; only \"gelu_pytorch_tanh\" is supported")));
        }
    }
    let heads = text.size("num_attention_heads")?;
    let kv_heads = text.uint("num_key_value_heads")?.unwrap_or(heads);
    text.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
    let head_dim = text.uint("head_dim")?.unwrap_or(HEAD_DIM);
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(text.error("head_dim", format!("{head_dim}; the rotary embedding needs an even one")));
    }
    let width = text.size("hidden_size")?;
    let (inner, eps) = (text.size("intermediate_size")?, text.positive("rms_norm_eps")?.unwrap_or(EPS));
    Ok(StreamShape { width, heads, kv_heads, head_dim, inner, kv_inputs: width, eps })
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
        let config = PaliGemmaConfig::from_json("config.json".as_ref(), &published()).expect("it is read");
        let outline =
            config.outline("".as_ref(), FileLocation { prefix: "", layers: None }).expect("all of it");
        assert_eq!(outline.parameters(), 2_923_335_408);
        assert_eq!((outline.tensors.len(), outline.image_tokens()), (603, 256));
        let fewer = config.outline("D".as_ref(), FileLocation { prefix: "", layers: Some(12) });
        let message = fewer.expect_err("it has 18").to_string();
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
            let message =
                PaliGemmaConfig::from_json("config.json".as_ref(), &json).expect_err("refused").to_string();
            assert!(message.contains(section) && message.contains(field), "{message}");
        }
    }
}
