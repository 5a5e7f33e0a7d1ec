//! The keys as the run file's reader sees them: their names, what they mean for the identity of a run, their
//! rules.

use coxswain_proto::{
    config::{
        Findings, TaskSchema, TaskSettings,
        bounds::{ABOVE_ZERO, Bounds, COUNT, LAYERS, NO_MOST, RANK, SIZE},
    },
    identity::{
        Class::{Base, Learned, LearnedInOrder, LearnedSince, Outside},
        Classes,
    },
    run_spec::RunSpec,
};

use super::{check, settings::VlaSettings};

/// The keys' schema.
pub const SCHEMA: TaskSchema = TaskSchema::of::<VlaSettings>();

impl TaskSettings for VlaSettings {
    const TYPE: &'static str = "vla_flow";

    const IDENTITY: &'static Classes = &[
        ("model.path", Base),
        ("model.backbone", Outside("where a policy's model is stored, not which model it is")),
        ("model.weights_dtype", Learned),
        ("model.activations_dtype", LearnedSince("\"float32\"")),
        ("model.train", LearnedSince("[]")),
        ("lora.rank", Learned),
        ("lora.alpha", Learned),
        ("lora.rslora", Learned),
        ("lora.targets", Learned),
        ("lora.rank_pattern", LearnedInOrder),
        ("lora.alpha_pattern", LearnedInOrder),
        ("lora.dropout", LearnedSince("0.0")),
        ("lora.use_dora", LearnedSince("false")),
        ("lora.bias", LearnedSince("\"none\"")),
        ("lora.exclude_modules", Learned),
        ("lora.layers_to_transform", LearnedSince("[]")),
        ("lora.layers_pattern", LearnedSince("[]")),
        ("lora.init_from", Learned),
        ("expert.head", LearnedSince("\"flow\"")),
        ("expert.width", Learned),
        ("expert.layers", Learned),
        ("expert.heads", Learned),
        ("expert.convention", Learned),
        ("expert.repeated_noise", Learned),
        ("expert.sampling_steps", Learned),
        ("expert.train", LearnedSince("true")),
        ("expert.preset", Outside("sets the defaults of other keys")),
        ("expert.action_encoder", LearnedSince("\"linear\"")),
        ("expert.state_encoder", LearnedSince("\"linear\"")),
        ("expert.action_decoder", LearnedSince("\"linear\"")),
        ("expert.ends_width", LearnedSince("1024")),
        ("expert.feature_norm", LearnedSince("false")),
        ("expert.future_tokens", LearnedSince("0")),
        ("expert.dropout", LearnedSince("0.0")),
        ("expert.loss", LearnedSince("\"lerobot\"")),
        ("sensor.width", Learned),
        ("sensor.tokens", Learned),
        ("data.episodes", LearnedSince("[]")),
        ("data.exclude_episodes", LearnedSince("[]")),
        ("data.cameras", Learned),
        ("data.rename_map", LearnedSince("{}")),
        ("data.state", Learned),
        ("data.sensor", Learned),
        ("data.action", Learned),
        ("data.horizon", Learned),
        ("data.action_stride", LearnedSince("1")),
        ("data.delta_actions", LearnedSince("[]")),
        ("data.normalization.state", Learned),
        ("data.normalization.action", Learned),
        ("data.normalization.sensor", Learned),
        ("data.prompt", Learned),
        ("data.resize", LearnedSince("\"smart_resize\"")),
        ("data.min_pixels", Learned),
        ("data.max_pixels", Learned),
        ("data.augmentation", LearnedSince("\"off\"")),
        ("data.sets", LearnedSince("[]")),
        ("observation.history", LearnedSince("[]")),
        ("observation.max_text_tokens", LearnedSince("null")),
        ("optimizer.lr.lora", Learned),
        ("optimizer.lr.base", LearnedSince("1e-5")),
        ("optimizer.lr.expert", Learned),
        ("optimizer.lr.sensor", Learned),
        ("serve.cameras", Outside("names in the protocol of `cox serve`")),
        ("serve.state", Outside("names in the protocol of `cox serve`")),
        ("serve.sensor", Outside("names in the protocol of `cox serve`")),
        ("serve.prompt", Outside("names in the protocol of `cox serve`")),
        ("serve.set", Outside("which statistics are used when serving, not what is learned")),
    ];

    const BOUNDS: &'static Bounds = &[
        ("lora.rank", 1.0, RANK),
        ("lora.alpha", ABOVE_ZERO, 1e9),
        ("lora.rank_pattern", 1.0, RANK),
        ("lora.alpha_pattern", ABOVE_ZERO, 1e9),
        ("lora.dropout", 0.0, 1.0),
        ("lora.layers_to_transform", 0.0, SIZE),
        ("expert.width", 1.0, SIZE),
        ("expert.layers", 1.0, LAYERS),
        ("expert.heads", 1.0, SIZE),
        ("expert.repeated_noise", 1.0, 4096.0),
        ("expert.sampling_steps", 1.0, SIZE),
        ("expert.ends_width", 1.0, SIZE),
        ("expert.future_tokens", 0.0, SIZE),
        ("expert.dropout", 0.0, 1.0),
        ("sensor.width", 1.0, SIZE),
        ("sensor.tokens", 1.0, SIZE),
        ("data.episodes", 0.0, COUNT),
        ("data.sensor", 1.0, SIZE),
        ("data.horizon", 1.0, SIZE),
        ("data.action_stride", 1.0, SIZE),
        ("data.min_pixels", 1.0, 2_147_483_648.0),
        ("data.max_pixels", 1.0, 2_147_483_648.0),
        ("observation.max_text_tokens", 1.0, 1e6),
        ("optimizer.lr.lora", 0.0, NO_MOST),
        ("optimizer.lr.base", 0.0, NO_MOST),
        ("optimizer.lr.expert", 0.0, NO_MOST),
        ("optimizer.lr.sensor", 0.0, NO_MOST),
    ];

    fn check(&self, spec: &RunSpec, findings: &mut Findings) {
        check::check(self, spec, findings);
    }
}
