//! What a run file says of the model: the section `model`.

use coxswain_nn::{
    dtypes::{ActivationsDtype, FrozenDtype},
    lora::check_train,
};
use coxswain_proto::{
    config::Findings,
    run_spec::{DeviceChoice, Offload, Recompute, RunSpec, Shard},
};
use serde::{Deserialize, Serialize};

/// The pretrained vision-language model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A Hugging Face directory of a vision-language model of a family that is read, or a policy directory of
    /// LeRobot's.
    pub path: String,
    /// The directory of the vision-language model that a policy of LeRobot's names by its hub name; Hugging
    /// Face's own cache if none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backbone: Option<String>,
    /// How frozen weights are kept in memory.
    #[serde(default)]
    pub weights_dtype: FrozenDtype,
    /// How precise the values are that blocks hand to each other, and that layer recompute keeps for the
    /// backward pass.
    #[serde(default)]
    pub activations_dtype: ActivationsDtype,
    /// Patterns of modules that train in full, without adapters: the group `base`. They match the end of a
    /// module's path, or of the path of a module that it is part of.
    #[serde(default)]
    pub train: Vec<String>,
}

impl Model {
    /// Rules.
    pub fn check(&self, spec: &RunSpec, f: &mut Findings) {
        f.named("model.path", &self.path, "name the directory of a Qwen2.5-VL or Qwen3-VL checkpoint");
        f.require(
            spec.memory.offload != Offload::Layers || self.weights_dtype.packing().is_none(),
            "memory.offload",
            format_args!(
                "is `layers`, but `model.weights_dtype: {}` would quantize every block each time it is read",
                self.weights_dtype.name()
            ),
            "set `memory.offload: none`, or `model.weights_dtype: bfloat16`",
        );
        f.require(
            spec.memory.shard != Shard::Frozen || self.weights_dtype.packing().is_none(),
            "memory.shard",
            format_args!(
                "is `frozen`, but matrices quantized by `model.weights_dtype: {}` cannot be split: their \
                 scales depend on the whole matrix",
                self.weights_dtype.name()
            ),
            "remove `memory.shard`, or set `model.weights_dtype: bfloat16`",
        );
        check_train(&self.train, f);
    }
}

/// Blocks that are not held need a recompute mode that does not keep their weights alive; `trains` says
/// whether anything of the model does.
pub fn check_blocks(spec: &RunSpec, trains: bool, f: &mut Findings) {
    let (offload, shard) = (spec.memory.offload, spec.memory.shard);
    f.require(
        shard != Shard::Frozen || offload != Offload::Layers,
        "memory.shard",
        "is `frozen`, but `memory.offload: layers` already leaves the frozen weights in their files",
        "set only one of the two: `layers` needs less memory, `frozen` reads the files once",
    );
    f.require(
        shard != Shard::Frozen || spec.launch.device != DeviceChoice::Cuda,
        "memory.shard",
        "is `frozen`, which works on CPUs only, but `launch.device` is `cuda`",
        "remove `memory.shard`, or set `launch.device: cpu`",
    );
    // What a backward pass runs again is brought again; what is kept of a block keeps the block's weights.
    let kept = match spec.train.recompute {
        Recompute::None => "every block's",
        Recompute::Every(n) if n > 1 => "most blocks'",
        // What fits is chosen among the modes that pass here.
        Recompute::Every(_) | Recompute::Selective | Recompute::Full | Recompute::Auto => return,
    };
    let keys = [
        ("memory.offload", "layers", offload == Offload::Layers),
        ("memory.shard", "frozen", shard == Shard::Frozen),
    ];
    for (key, value, _) in keys.into_iter().filter(|(.., asked)| *asked) {
        f.require(
            !trains,
            key,
            format_args!(
                "is `{value}`, but with this `train.recompute` {kept} weights stay in memory until the backward pass"
            ),
            "set `train.recompute: full` or `selective`",
        );
    }
}
