//! The model's modules by the paths that Transformers and PEFT give them, known from sizes alone.

use coxswain_nn::lora::{Module, ModuleKind};

use super::config::Qwen3VlConfig;
use crate::two_towers::modules::TowersModules;

/// All named modules of `Qwen3VLForConditionalGeneration`, in its order.
pub fn modules(config: &Qwen3VlConfig) -> Vec<Module> {
    // The family is younger than the change of names in Transformers 4.52.
    let mut list = TowersModules::new(str::to_owned);
    list.other("model");
    vision(config, &mut list);
    list.language_model(&config.text, config.tie_word_embeddings);
    list.into_modules()
}

fn vision(config: &Qwen3VlConfig, list: &mut TowersModules) {
    let vision = &config.vision;
    let (d, f, side) = (vision.hidden_size, vision.intermediate_size, vision.patch_size);
    let shape = [d, vision.in_channels, vision.temporal_patch_size, side, side];
    list.other("model.visual");
    list.other("model.visual.patch_embed");
    list.push("model.visual.patch_embed.proj", ModuleKind::Convolution { shape, bias: true });
    let rows = vision.position_side * vision.position_side;
    list.push("model.visual.pos_embed", ModuleKind::Embedding { rows, width: d, tied: false });
    list.other("model.visual.rotary_pos_emb");
    list.other("model.visual.blocks");
    for block in 0..vision.depth {
        let at = format!("model.visual.blocks.{block}");
        list.other(&at);
        list.layer_norm(&format!("{at}.norm1"), d);
        list.layer_norm(&format!("{at}.norm2"), d);
        list.other(&format!("{at}.attn"));
        list.linear(&format!("{at}.attn.qkv"), [d, 3 * d], true);
        list.linear(&format!("{at}.attn.proj"), [d, d], true);
        list.other(&format!("{at}.mlp"));
        list.linear(&format!("{at}.mlp.linear_fc1"), [d, f], true);
        list.linear(&format!("{at}.mlp.linear_fc2"), [f, d], true);
        list.other(&format!("{at}.mlp.act_fn"));
    }
    let (merged, out) = (vision.merged_size(), vision.out_hidden_size);
    let mut merger = |at: &str, normed: usize| {
        list.other(at);
        list.layer_norm(&format!("{at}.norm"), normed);
        list.linear(&format!("{at}.linear_fc1"), [merged, merged], true);
        list.other(&format!("{at}.act_fn"));
        list.linear(&format!("{at}.linear_fc2"), [merged, out], true);
    };
    merger("model.visual.merger", d);
    if !vision.deepstack_blocks.is_empty() {
        let streams = "model.visual.deepstack_merger_list";
        (0..vision.deepstack_blocks.len()).for_each(|stream| merger(&format!("{streams}.{stream}"), merged));
    }
}
