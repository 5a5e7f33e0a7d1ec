//! Building a policy from a run spec: the model is read, adapters and experts are registered in one layout,
//! and the flat parameter buffer gets its initial values.

use crate::vla_flow::config::{ActionEncoder, HeadKind, VlaSettings};
use coxswain_proto::run_spec::RunSpec;

use super::{
    error::PolicyError,
    parts::{Policy, Settings, Source},
    tap::{TrainedParts, resolve},
};
use crate::{
    pretrained,
    vla_flow::{
        adapters::Split,
        data::SampleDims,
        expert::Learning,
        head::{HeadShape, deepest_kept, reads},
        sensor::{SensorEncoder, SensorShape},
    },
};
use coxswain_models::{
    Shelf,
    pretrained::{
        adapters::{Adapters, HeadAdapter, TunedModules},
        blocks::{BlockWeights, TablePlace},
        checkpoint::CheckpointDir,
        error::ModelError,
    },
    vision_language::LoadOptions,
};
use coxswain_nn::{kernels::Tape, params::TrainableLayout, recompute::Retention};

/// Why the LM head takes no adapter.
const HEAD_IS_UNUSED: HeadAdapter =
    HeadAdapter::Refused("which gets no gradient from the action loss, so it would never train");

impl<B: Tape<Base = B>> Policy<B> {
    /// Reads the model directory and builds the policy for samples of these sizes. Returns it with the layout
    /// of everything that trains and the values it starts from; both are the same on every rank.
    pub fn load(
        spec: &RunSpec,
        models: Shelf<B>,
        dims: SampleDims,
        device: &B::Device,
    ) -> Result<(Self, TrainableLayout, Vec<f32>), PolicyError> {
        let (policy, layout) = Self::load_without_values(spec, models, dims, device)?;
        let values = policy.initial_values(spec, &layout)?;
        Ok((policy, layout, values))
    }

    /// Reads and builds as [`load`](Self::load) does, without the values, which may be many to draw.
    pub fn load_without_values(
        spec: &RunSpec,
        models: Shelf<B>,
        dims: SampleDims,
        device: &B::Device,
    ) -> Result<(Self, TrainableLayout), PolicyError> {
        let vla = VlaSettings::from_spec(spec)?;
        check(&vla, dims)?;
        let dir = &pretrained::directory::<B>(&vla.model.path)?;
        let family = models.vision_language.of(dir)?;
        let outline = family.outline(dir)?;
        let split = Split::from_settings(&vla, &outline).map_err(ModelError::from)?;
        let tuned =
            TunedModules::resolve(split.model.as_ref(), &vla.model.train, &outline.modules, HEAD_IS_UNUSED)?;
        let mut layout = TrainableLayout::default();
        let trained = TrainedParts::new(&outline, tuned.trains());
        let tap = resolve(&spec.cache, &trained, deepest_kept(&vla, &outline))?;
        let (blocks, table) = (BlockWeights::from_spec(spec), TablePlace::from_spec(spec));
        let options = LoadOptions { blocks, table, ..vla.model.weights_dtype.into() };
        let model = family.load(dir, options, tuned.trains(), &mut layout, device)?;
        let sensor = (dims.sensor_window > 0).then(|| {
            let shape = SensorShape {
                window: dims.sensor_window,
                channels: dims.sensor_channels,
                tokens: vla.sensor.tokens,
                width: vla.sensor.width,
                outputs: vla.expert.width,
            };
            SensorEncoder::register(&mut layout, shape)
        });
        let learning = Learning::new(vla.expert.train, split.expert.as_ref());
        let head = HeadShape::from_settings(&vla, (&outline).into(), dims).register(&mut layout, learning);
        let settings = Settings {
            seed: spec.run.seed,
            convention: vla.expert.convention,
            repeats: vla.expert.repeated_noise,
            sampling_steps: vla.expert.sampling_steps,
            retention: Retention {
                recompute: spec.train.recompute,
                activations: vla.model.activations_dtype,
            },
            cache: spec.cache.mode,
        };
        let TunedModules { adapters, full } = tuned;
        let lora = adapters.map(|Adapters { plan, .. }| plan);
        let source = Source { dir: dir.into(), dtype: vla.model.weights_dtype };
        let device = device.clone();
        let policy = Self {
            model,
            lora,
            full,
            sensor,
            head,
            reads: reads(&vla, &outline),
            expert_lora: split.expert,
            tap,
            source,
            dims,
            settings,
            device,
        };
        Ok((policy, layout))
    }

    /// What the trainables of a loaded policy started from, once more.
    pub fn initial_values(&self, spec: &RunSpec, layout: &TrainableLayout) -> Result<Vec<f32>, PolicyError> {
        let vla = VlaSettings::from_spec(spec)?;
        let dir = &pretrained::directory::<B>(&vla.model.path)?;
        let outline = self.model.outline();
        let modules = &outline.modules;
        let lora = Split::from_settings(&vla, outline).map_err(ModelError::from)?.model;
        let tuned = TunedModules::resolve(lora.as_ref(), &vla.model.train, modules, HEAD_IS_UNUSED)?;
        let checkpoint = CheckpointDir { path: dir, rules: outline.rules };
        Ok(tuned.initial_values::<B>(spec.run.seed, layout, checkpoint, vla.model.weights_dtype)?)
    }
}

/// What only shows when the run file meets the data set, and what would otherwise divide by zero.
fn check(vla: &VlaSettings, dims: SampleDims) -> Result<(), PolicyError> {
    let refuse = |field, problem| Err(PolicyError::Setting { field, problem });
    let at_least_one = [
        ("expert.width", vla.expert.width),
        ("expert.layers", vla.expert.layers),
        ("expert.heads", vla.expert.heads),
        ("expert.repeated_noise", vla.expert.repeated_noise),
        ("expert.sampling_steps", vla.expert.sampling_steps),
        ("expert.ends_width", vla.expert.ends_width),
        ("sensor.width", vla.sensor.width),
        ("sensor.tokens", vla.sensor.tokens),
        ("data.action", dims.action),
        ("data.horizon", dims.horizon),
    ];
    if let Some((field, _)) = at_least_one.into_iter().find(|(_, value)| *value == 0) {
        return refuse(field, "0; expected at least 1".into());
    }
    if !vla.data.rename_map.is_empty() {
        let problem = "is only for LeRobot policies, but `model.path` is not one; remove it";
        return refuse("data.rename_map", problem.into());
    }
    let (width, heads) = (vla.expert.width, vla.expert.heads);
    if !width.is_multiple_of(heads) {
        return refuse("expert.heads", format!("{heads} heads do not divide expert.width {width}"));
    }
    if vla.expert.action_encoder == ActionEncoder::TimeMlp && !width.is_multiple_of(2) {
        let problem = format!("is `time_mlp`, which needs an even width, but the width is {width}");
        return refuse("expert.action_encoder", problem);
    }
    let seen = [("data.state", dims.state), ("data.sensor", dims.sensor_window)];
    if let Some((field, _)) = seen.into_iter().find(|(_, size)| vla.expert.head == HeadKind::Oft && *size > 0)
    {
        let problem = "is an input, but the head `oft` takes only images and text; set data.state to `none` and remove data.sensor";
        return refuse(field, problem.into());
    }
    let (window, tokens) = (dims.sensor_window, vla.sensor.tokens);
    if window > 0 && dims.sensor_channels == 0 {
        return refuse("data.sensor", "its readings have no channels; name another feature".into());
    }
    if window > 0 && tokens > window {
        let problem = format!("{tokens} tokens for a window of {window} readings; set at most {window}");
        return refuse("sensor.tokens", problem);
    }
    Ok(())
}
