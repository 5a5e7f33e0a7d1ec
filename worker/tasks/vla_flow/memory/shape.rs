//! The shapes of one micro-batch, for the meta step.

use coxswain_nn::dtypes::ActivationsDtype;
use coxswain_nn::dtypes::WeightsDtype;

use super::{
    Subject,
    meta::{
        BlockShape, Entry, ExpertShape, Linear, Projections, SensorShape, StepShape, VlShape, Weight, Widths,
    },
};
use crate::vla_flow::policy::Tap;

/// Bytes of an activation's element: products accumulate in fp32 whatever the weights are; what recompute
/// keeps may be narrower.
pub(super) fn widths(subject: &Subject) -> Widths {
    let kept = match subject.vla.model.activations_dtype {
        ActivationsDtype::Float32 => 4,
        ActivationsDtype::Bfloat16 => 2,
    };
    Widths { each: 4, kept }
}

/// The shapes of a micro-batch of `batch` longest samples that begins with kept features at `entry`, or with
/// pixels.
pub(super) fn step(subject: &Subject, batch: u64, entry: Option<Tap>) -> StepShape {
    let entry = match entry {
        None => Entry::Pixels,
        Some(Tap::Vision) => Entry::Images,
        Some(Tap::Layer(layer)) => Entry::Layer(layer),
        Some(Tap::Final) => Entry::Hidden,
    };
    StepShape {
        vl: VlShape { entry, ..vl(subject, batch) },
        expert: expert(subject, batch),
        recompute: subject.spec.train.recompute,
        widths: widths(subject),
    }
}

/// The part of the model below a tap, without a trace.
pub(super) fn below(subject: &Subject, batch: u64, tap: Tap) -> VlShape {
    let frozen = Subject { lora: None, ..subject.clone() };
    let mut shape = vl(&frozen, batch);
    let layers = match tap {
        Tap::Vision => 0,
        Tap::Layer(layer) => layer,
        Tap::Final => shape.text.len(),
    };
    shape.text.truncate(layers);
    shape
}

fn vl(subject: &Subject, batch: u64) -> VlShape {
    let (text, vision) = (&subject.config.text, &subject.config.vision);
    let linears = Linears { subject };
    let sequence = subject.outline.prompt_tokens as u64;
    let image = subject.outline.grids.iter().map(|grid| u64::from(grid[1]) * u64::from(grid[2])).max();
    let image = image.unwrap_or(0);
    let window = (vision.window_tokens() * vision.window_tokens() * vision.merge_unit()) as u64;
    let kv = text.num_kv_heads * text.head_dim;
    let merged = vision.hidden_size * vision.merge_unit();
    let block = |index: usize| {
        let at = format!("model.visual.blocks.{index}");
        let full = vision.full_attention_blocks.contains(&index);
        BlockShape {
            streamed: 0,
            heads: vision.num_heads as u64,
            keys: if full { image } else { window.min(image) },
            projections: Projections::Together(
                linears.get(&format!("{at}.attn.qkv"), 3 * vision.hidden_size),
            ),
            output: linears.get(&format!("{at}.attn.proj"), vision.hidden_size),
            gate: linears.get(&format!("{at}.mlp.gate_proj"), vision.intermediate_size),
            up: linears.get(&format!("{at}.mlp.up_proj"), vision.intermediate_size),
            down: linears.get(&format!("{at}.mlp.down_proj"), vision.hidden_size),
        }
    };
    let layer = |index: usize| {
        let at = format!("model.language_model.layers.{index}");
        let attention = |name: &str, outputs| linears.get(&format!("{at}.self_attn.{name}"), outputs);
        BlockShape {
            streamed: 0,
            heads: text.num_heads as u64,
            keys: sequence,
            projections: Projections::Apart([
                attention("q_proj", text.hidden_size),
                attention("k_proj", kv),
                attention("v_proj", kv),
            ]),
            output: attention("o_proj", text.hidden_size),
            gate: linears.get(&format!("{at}.mlp.gate_proj"), text.intermediate_size),
            up: linears.get(&format!("{at}.mlp.up_proj"), text.intermediate_size),
            down: linears.get(&format!("{at}.mlp.down_proj"), text.hidden_size),
        }
    };
    VlShape {
        entry: Entry::Pixels,
        patches: batch * subject.outline.patches(),
        patch_values: vision.patch_values() as u64,
        vision_head: vision.head_dim as u64,
        embed: linears.frozen(vision.hidden_size),
        vision: (0..vision.depth).map(block).collect(),
        merger: [
            linears.get("model.visual.merger.mlp.0", merged),
            linears.get("model.visual.merger.mlp.2", vision.out_hidden_size),
        ],
        merge_unit: vision.merge_unit() as u64,
        tokens: batch * sequence,
        width: text.hidden_size as u64,
        head: text.head_dim as u64,
        text: (0..text.num_layers).map(layer).collect(),
        narrow_table: subject.vla.model.weights_dtype == WeightsDtype::Bfloat16,
    }
}

fn expert(subject: &Subject, batch: u64) -> ExpertShape {
    let (vla, dims) = (&subject.vla, subject.outline.dims);
    let tokens = vla.sensor.tokens.max(1);
    ExpertShape {
        width: vla.expert.width as u64,
        layers: vla.expert.layers as u64,
        heads: vla.expert.heads as u64,
        state: dims.state as u64,
        action: dims.action as u64,
        horizon: dims.horizon as u64,
        batch,
        repeats: vla.expert.repeated_noise as u64,
        context_tokens: subject.outline.prompt_tokens as u64,
        sensor: (dims.sensor_window > 0).then(|| SensorShape {
            width: vla.sensor.width as u64,
            tokens: tokens as u64,
            inputs: (dims.sensor_window.div_ceil(tokens) * dims.sensor_channels) as u64,
        }),
    }
}

/// Frozen linears and their adapters.
struct Linears<'a> {
    subject: &'a Subject,
}

impl Linears<'_> {
    fn get(&self, module: &str, outputs: usize) -> Linear {
        let adapter = self.subject.lora.as_ref().and_then(|plan| plan.adapter(module));
        let narrow = self.narrow();
        let weight = match adapter {
            Some(adapter) => Weight::Adapted { rank: adapter.rank as u64, narrow },
            None => Weight::Frozen { narrow },
        };
        Linear { outputs: outputs as u64, weight }
    }

    fn frozen(&self, outputs: usize) -> Linear {
        Linear { outputs: outputs as u64, weight: Weight::Frozen { narrow: self.narrow() } }
    }

    fn narrow(&self) -> bool {
        self.subject.vla.model.weights_dtype == WeightsDtype::Bfloat16
    }
}
