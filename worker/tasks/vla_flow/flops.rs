//! Multiplications and additions of a micro-batch, from sizes alone: what a cache skips, what it leaves, and
//! so how much faster a step can become at most.
//!
//! ```text
//! linear i -> o, n tokens         forward 2nio        backward, input 2nio    weight (if it trains) 2nio
//! its adapter of rank r           forward 2nr(i+o)    backward, input 2nr(i+o)    both matrices 2nr(i+o)
//! attention, p scores, heads k    forward 4pk         backward 10pk (scores again, and four products)
//! ```
//!
//! Counted is what has to be computed: a causal row of s tokens has s(s+1)/2 scores; below the first adapter
//! of a tower there is no backward pass, and in the block of that adapter none beyond it; keys and values of
//! constant hidden states need no input gradient. Norms, activations, the optimizer and layer recompute are
//! left out, so a ratio of these numbers is a bound, not a promise.

use super::{
    expert::{ExpertShape, TIME_WIDTH},
    policy::Tap,
};
use coxswain_models::qwen2_5_vl::{Trains, config::QwenConfig};
use coxswain_nn::lora::{Bias, LoraPlan, TrainedModules};

/// Width of the expert's time embedding.
const TIME: u64 = TIME_WIDTH as u64;

/// A micro-batch and what runs on it.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a> {
    /// Sizes of the model.
    pub config: &'a QwenConfig,
    /// Its adapters.
    pub lora: Option<&'a LoraPlan>,
    /// What of it trains in full.
    pub full: &'a TrainedModules,
    /// Sizes of the expert.
    pub expert: ExpertShape,
    /// Whether it trains.
    pub expert_trains: bool,
    /// Rows.
    pub rows: usize,
    /// Tokens of each row.
    pub tokens: usize,
    /// Patch grids of each row's images, `(t, h, w)`.
    pub grids: &'a [[u32; 3]],
    /// Draws of noise for each row.
    pub repeats: usize,
}

/// What is counted, both directions apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// Forward.
    pub forward: u64,
    /// Backward.
    pub backward: u64,
}

impl Flops {
    /// Both.
    pub fn total(self) -> u64 {
        self.forward + self.backward
    }

    fn and(self, other: Self) -> Self {
        Self { forward: self.forward + other.forward, backward: self.backward + other.backward }
    }
}

/// How far the backward pass of a block goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// Not into it.
    None,
    /// To its adapters: its first projections' inputs are constant.
    Adapters,
    /// Through it.
    Through,
}

/// Sizes of a transformer block.
struct BlockCounts {
    tokens: u64,
    width: u64,
    /// Modules that read the block's input, with their outputs.
    first: Vec<(String, u64)>,
    /// The others, with inputs and outputs.
    rest: [(String, [u64; 2]); 4],
    /// Scores of all heads, times the width of a head.
    scores: u64,
}

impl Workload<'_> {
    /// A training pass that begins with kept features at `entry`, or with pixels.
    pub fn step(&self, entry: Option<Tap>) -> Flops {
        let (vision_trains, layers) = (entry.is_none() && self.vision_trains(), self.first_layer(entry));
        let vision = if entry.is_none() { self.vision(vision_trains) } else { Flops::default() };
        let language = layers.map_or_else(Flops::default, |first| self.language(first, vision_trains));
        let hidden_trains = layers.is_some_and(|first| vision_trains || self.first_adapted(first).is_some());
        vision.and(language).and(self.expert(hidden_trains))
    }

    /// The forward pass alone, from pixels to a tap: what one missing feature costs.
    pub fn below(&self, tap: Tap) -> u64 {
        let layers = match tap {
            Tap::Vision => 0,
            Tap::Layer(layer) => layer,
            Tap::Final => self.config.text.num_layers,
        };
        let decoder: u64 = (0..layers).map(|layer| self.block(&self.layer(layer), Depth::None).forward).sum();
        self.vision(false).forward + decoder
    }

    /// The first decoder layer that runs; none if no layer does.
    fn first_layer(&self, entry: Option<Tap>) -> Option<usize> {
        match entry {
            None | Some(Tap::Vision) => Some(0),
            Some(Tap::Layer(layer)) => Some(layer),
            Some(Tap::Final) => None,
        }
    }

    fn rank(&self, module: &str) -> u64 {
        self.lora.and_then(|plan| plan.adapter(module)).map_or(0, |adapter| adapter.rank as u64)
    }

    fn trains(&self, block: &BlockCounts) -> bool {
        let names = block.first.iter().map(|(name, _)| name).chain(block.rest.iter().map(|(name, _)| name));
        let trains = Trains { lora: self.lora, full: Some(self.full) };
        names.into_iter().any(|name| trains.touches(name))
    }

    fn vision_trains(&self) -> bool {
        let names = |plan: &LoraPlan| {
            plan.recipe().bias == Bias::All
                || plan.adapters().any(|(name, _)| name.starts_with("model.visual."))
        };
        self.lora.is_some_and(names) || self.full.iter().any(|name| name.starts_with("model.visual."))
    }

    fn first_adapted(&self, first: usize) -> Option<usize> {
        (first..self.config.text.num_layers).find(|&layer| self.trains(&self.layer(layer)))
    }

    fn language(&self, first: usize, below_trains: bool) -> Flops {
        let adapted = self.first_adapted(first);
        let depth = |layer| match adapted {
            _ if below_trains => Depth::Through,
            Some(adapted) if layer == adapted => Depth::Adapters,
            Some(adapted) if layer > adapted => Depth::Through,
            _ => Depth::None,
        };
        let layers =
            (first..self.config.text.num_layers).map(|layer| self.block(&self.layer(layer), depth(layer)));
        layers.fold(Flops::default(), Flops::and)
    }

    fn layer(&self, layer: usize) -> BlockCounts {
        let text = &self.config.text;
        let (d, f) = (text.hidden_size as u64, text.intermediate_size as u64);
        let kv = (text.num_kv_heads * text.head_dim) as u64;
        let (s, at) = (self.tokens as u64, format!("model.language_model.layers.{layer}"));
        let attention = |name: &str, outputs| (format!("{at}.self_attn.{name}"), outputs);
        BlockCounts {
            tokens: self.rows as u64 * s,
            width: d,
            first: vec![attention("q_proj", d), attention("k_proj", kv), attention("v_proj", kv)],
            rest: [
                (format!("{at}.self_attn.o_proj"), [d, d]),
                (format!("{at}.mlp.gate_proj"), [d, f]),
                (format!("{at}.mlp.up_proj"), [d, f]),
                (format!("{at}.mlp.down_proj"), [f, d]),
            ],
            scores: self.rows as u64 * s * (s + 1) / 2 * d,
        }
    }

    fn vision(&self, trains: bool) -> Flops {
        let (vision, rows) = (&self.config.vision, self.rows as u64);
        let patches: u64 =
            self.grids.iter().map(|grid| grid.iter().map(|&side| u64::from(side)).product::<u64>()).sum();
        let patches = rows * patches;
        let (d, unit) = (vision.hidden_size as u64, vision.merge_unit() as u64);
        let embed = Flops { forward: 2 * patches * vision.patch_values() as u64 * d, backward: 0 };
        let first = (0..vision.depth).find(|&block| self.trains(&self.vision_block(block, patches)));
        let depth = |block| match first {
            Some(first) if trains && block == first => Depth::Adapters,
            Some(first) if trains && block > first => Depth::Through,
            _ => Depth::None,
        };
        let blocks =
            (0..vision.depth).map(|block| self.block(&self.vision_block(block, patches), depth(block)));
        let into_blocks = trains && first.is_some();
        let merger = [("0", d * unit), ("2", vision.out_hidden_size as u64)].map(|(number, outputs)| {
            let name = format!("model.visual.merger.mlp.{number}");
            let backward = if number == "2" { trains } else { into_blocks };
            self.linear(&name, [patches / unit, d * unit, outputs], (trains, backward))
        });
        blocks.chain(merger).fold(embed, Flops::and)
    }

    fn vision_block(&self, block: usize, patches: u64) -> BlockCounts {
        let vision = &self.config.vision;
        let (d, f) = (vision.hidden_size as u64, vision.intermediate_size as u64);
        let at = format!("model.visual.blocks.{block}");
        let window = (vision.window_tokens() * vision.window_tokens() * vision.merge_unit()) as u64;
        let full = vision.full_attention_blocks.contains(&block);
        let scores = self.grids.iter().map(|&[t, h, w]| {
            let frame = u64::from(h) * u64::from(w);
            u64::from(t) * frame * if full { frame } else { window.min(frame) }
        });
        BlockCounts {
            tokens: patches,
            width: d,
            first: vec![(format!("{at}.attn.qkv"), 3 * d)],
            rest: [
                (format!("{at}.attn.proj"), [d, d]),
                (format!("{at}.mlp.gate_proj"), [d, f]),
                (format!("{at}.mlp.up_proj"), [d, f]),
                (format!("{at}.mlp.down_proj"), [f, d]),
            ],
            scores: self.rows as u64 * scores.sum::<u64>() * d,
        }
    }

    fn block(&self, block: &BlockCounts, depth: Depth) -> Flops {
        let BlockCounts { tokens, width, .. } = *block;
        let trains = depth != Depth::None;
        let first = block.first.iter().map(|(name, outputs)| {
            self.linear(name, [tokens, width, *outputs], (trains, depth == Depth::Through))
        });
        let rest = block.rest.iter().map(|(name, [inputs, outputs])| {
            self.linear(name, [tokens, *inputs, *outputs], (trains, trains))
        });
        first.chain(rest).fold(attention(block.scores, trains), Flops::and)
    }

    /// A linear layer and its adapter. `trains`: whether its gradient is wanted at all, and that of
    /// its input.
    fn linear(&self, module: &str, [tokens, inputs, outputs]: [u64; 3], trains: (bool, bool)) -> Flops {
        let thin = 2 * tokens * self.rank(module) * (inputs + outputs);
        let dense = 2 * tokens * inputs * outputs;
        let input = if trains.1 { dense + thin } else { 0 };
        let adapter = if trains.0 { thin } else { 0 };
        let weight = if trains.0 && self.full.contains(module) { dense } else { 0 };
        Flops { forward: dense + thin, backward: input + adapter + weight }
    }

    fn expert(&self, hidden_trains: bool) -> Flops {
        let shape = &self.expert;
        let (w, rows, draws) = (shape.width as u64, self.rows as u64, (self.rows * self.repeats) as u64);
        let tokens = shape.tokens() as u64;
        let (queries, hidden) = (draws * tokens, rows * self.tokens as u64);
        // A gradient for the input, and one for the weight if it trains; nothing below the condition does
        // unless the expert does.
        let weight = u64::from(self.expert_trains);
        let dense =
            |n: u64, i: u64, o: u64| Flops { forward: 2 * n * i * o, backward: 2 * (1 + weight) * n * i * o };
        let of_time =
            |i: u64, o: u64| Flops { forward: 2 * draws * i * o, backward: weight * 4 * draws * i * o };
        let actions = draws * shape.horizon as u64;
        let form = shape.form;
        let time = if form.time_in_actions {
            dense(actions, 2 * w, w).and(dense(actions, w, w))
        } else {
            Flops::default()
        };
        let (state, action) = (shape.state as u64, shape.action as u64);
        let state = form.state_hidden.map_or_else(Flops::default, |hidden| {
            dense(rows, state, hidden as u64).and(dense(rows, hidden as u64, w))
        });
        let decoder = form.decoder_hidden.map_or_else(Flops::default, |hidden| {
            let h = hidden as u64;
            dense(actions, w, h).and(dense(actions, h, h)).and(dense(actions, h, action))
        });
        let ends = [
            time,
            state,
            decoder,
            Flops { forward: 2 * draws * TIME * w, backward: weight * 2 * draws * TIME * w },
            of_time(w, w),
            of_time(w, 2 * w),
            dense(actions, action, 2 * w),
        ];
        let blocks = (0..shape.layers).map(|block| {
            let cross = block % 2 == 0;
            let (source, context) = if cross { (hidden, shape.context as u64) } else { (queries, w) };
            let keys = 2 * 2 * source * context * w;
            let constant = cross && !hidden_trains;
            let keys = Flops { forward: keys, backward: (weight + u64::from(!constant)) * keys };
            let scores = if cross { queries * self.tokens as u64 } else { queries * tokens };
            let mlp = dense(queries, w, 4 * w).and(dense(queries, 4 * w, w));
            let around = dense(queries, w, 2 * w).and(of_time(w, 2 * w));
            keys.and(attention(scores * w, true)).and(mlp).and(around)
        });
        blocks.chain(ends).fold(Flops::default(), Flops::and)
    }
}

/// `scores`: of all heads, times the width of a head.
fn attention(scores: u64, trains: bool) -> Flops {
    Flops { forward: 4 * scores, backward: if trains { 10 * scores } else { 0 } }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use coxswain_nn::lora::Lora;
    use coxswain_nn::lora::LoraTargets;

    use super::*;
    use crate::vla_flow::expert::ExpertForm;
    use coxswain_models::qwen2_5_vl::modules::modules;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/assets/tiny-vla");
    const EXPERT: ExpertShape = ExpertShape {
        width: 32,
        layers: 2,
        heads: 2,
        context: 128,
        state: 3,
        sensor_tokens: 0,
        horizon: 4,
        action: 2,
        form: ExpertForm::PLAIN,
    };

    fn with_lora<R>(targets: Option<&str>, op: impl FnOnce(Workload<'_>) -> R) -> R {
        let config = QwenConfig::read(Path::new(MODEL)).expect("the checkpoint is sound");
        let plan = targets.map(|targets| {
            let targets = LoraTargets::Regex(targets.into());
            let lora = Lora { rank: 2, alpha: 2.0, targets, ..Lora::default() };
            LoraPlan::resolve(&lora, &modules(&config)).expect("some modules match")
        });
        let grids = [[1, 4, 4]];
        op(Workload {
            config: &config,
            lora: plan.as_ref(),
            full: &TrainedModules::default(),
            expert: EXPERT,
            expert_trains: true,
            rows: 2,
            tokens: 10,
            grids: &grids,
            repeats: 1,
        })
    }

    #[test]
    fn a_frozen_model_has_no_backward_pass_and_a_deeper_tap_leaves_less() {
        with_lora(None, |work| {
            let live = work.step(None);
            assert_eq!(live.backward, work.step(Some(Tap::Final)).backward, "the expert's alone");
            let taps = [Tap::Vision, Tap::Layer(0), Tap::Layer(3), Tap::Final];
            let left = taps.map(|tap| work.step(Some(tap)).total());
            assert!(left[0] == left[1] && left[1] > left[2] && left[2] > left[3], "{left:?}");
            for tap in taps {
                assert_eq!(live.total() - work.step(Some(tap)).total(), work.below(tap), "{tap}");
            }
        });
    }

    #[test]
    fn a_layer_of_the_model_is_counted_by_hand() {
        with_lora(None, |work| {
            let layer = work.below(Tap::Layer(1)) - work.below(Tap::Layer(0));
            // 20 tokens, width 128, keys and values of 64, MLP of 352; 2 rows of 55 scores.
            let products = 2 * 20 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 352);
            assert_eq!(layer, products + 4 * 2 * 55 * 128);
        });
    }

    #[test]
    fn adapters_cost_a_backward_pass_from_their_block_upwards() {
        let total = |targets| with_lora(Some(targets), |work| work.step(None).backward);
        let (top, middle, all) = (
            total(r".*layers\.5\..*q_proj"),
            total(r".*layers\.3\..*q_proj"),
            total(r".*layers\.[0-5]\..*q_proj"),
        );
        assert!(top < middle && middle < all);
        with_lora(Some(r".*layers\.5\..*q_proj"), |work| {
            let live = work.step(None);
            let cached = work.step(Some(Tap::Layer(5)));
            assert_eq!(live.backward, cached.backward, "an exact cache takes nothing from the backward pass");
            assert!(work.step(Some(Tap::Final)).backward < cached.backward, "constant hidden states do");
        });
    }

    #[test]
    fn an_adapted_vision_tower_is_run_backward_too() {
        with_lora(Some(r".*visual\.blocks\.1\.attn\.qkv"), |work| {
            with_lora(Some(r".*visual\.blocks\.3\.attn\.qkv"), |higher| {
                assert!(work.step(None).backward > higher.step(None).backward);
            });
        });
    }
}
