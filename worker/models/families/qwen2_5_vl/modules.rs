//! The model's modules by the paths that Transformers 5 and PEFT give them, known from sizes alone.

use coxswain_nn::lora::{Module, ModuleKind};

use super::config::QwenConfig;
use crate::two_towers::modules::TowersModules;

/// All named modules of `Qwen2_5_VLForConditionalGeneration`, in its order.
pub fn modules(config: &QwenConfig) -> Vec<Module> {
    let mut list = TowersModules::new(old_name);
    list.other("model");
    vision(config, &mut list);
    list.language_model(&config.text.sizes(), config.tie_word_embeddings);
    list.into_modules()
}

fn vision(config: &QwenConfig, list: &mut TowersModules) {
    let vision = &config.vision;
    let (d, f) = (vision.hidden_size, vision.intermediate_size);
    let side = vision.patch_size;
    let shape = [d, vision.in_channels, vision.temporal_patch_size, side, side];
    list.other("model.visual");
    list.other("model.visual.patch_embed");
    list.push("model.visual.patch_embed.proj", ModuleKind::Convolution { shape, bias: false });
    list.other("model.visual.rotary_pos_emb");
    list.other("model.visual.blocks");
    for block in 0..vision.depth {
        let at = format!("model.visual.blocks.{block}");
        list.other(&at);
        list.norm(&format!("{at}.norm1"), d);
        list.norm(&format!("{at}.norm2"), d);
        list.other(&format!("{at}.attn"));
        list.linear(&format!("{at}.attn.qkv"), [d, 3 * d], true);
        list.linear(&format!("{at}.attn.proj"), [d, d], true);
        list.gated_mlp(&at, [d, f], true);
    }
    let merged = d * vision.merge_unit();
    list.other("model.visual.merger");
    list.norm("model.visual.merger.ln_q", d);
    list.other("model.visual.merger.mlp");
    list.linear("model.visual.merger.mlp.0", [merged, merged], true);
    list.other("model.visual.merger.mlp.1");
    list.linear("model.visual.merger.mlp.2", [merged, vision.out_hidden_size], true);
}

/// The path that `name` had before Transformers 4.52.
fn old_name(name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) if rest.starts_with("visual") => rest.into(),
        Some(rest) => {
            rest.strip_prefix("language_model.").map_or("model".into(), |rest| format!("model.{rest}"))
        }
        None => name.into(),
    }
}
