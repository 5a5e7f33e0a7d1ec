//! One pass of a pi0.5 policy from file to file, to hold beside LeRobot's.

use coxswain_models::{
    Shelf,
    joint::JointOutline,
    pretrained::{checkpoint::CheckpointDir, error::ModelError},
};
use coxswain_nn::{
    kernels::{Tape, pool},
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;

use super::{config::Pi05Config, inputs::Pi05Prompts, names::RULES, network::Pi05, tuning::tuned};
use crate::{
    images::Alignment,
    pass::{self, PassJob, PassPolicy},
    pass_files::PassInputs,
    policy::PolicyFiles,
    tuning::TuningSettings,
};

/// What fills the end of a row; nothing attends to it.
const PAD: u32 = 0;

/// Samples from the noise; with recorded actions also the loss at the given times.
pub fn run<B: Tape<Base = B>>(
    job: PassJob<'_>,
    models: Shelf<B>,
    device: &B::Device,
) -> Result<(), ModelError> {
    pool::join();
    let inputs = &PassInputs::read(job.inputs)?;
    let (files, mut layout) = (job.files, TrainableLayout::default());
    let config = Pi05Config::of(files.directory)?;
    let outline = outline(files, &config, models)?;
    let tuned = tuned(&config, &outline, TuningSettings::default())?;
    let policy = Pi05::load(files, &tuned, models, &mut layout, device)?;
    let checkpoint = CheckpointDir { path: &files.directory.dir, rules: RULES };
    let initial = tuned.initial_values::<B>(0, &layout, checkpoint, files.dtype)?;
    let trainables = &Trainables::new(layout, initial, device);
    let prompts = Pi05Prompts::open(files.backbone, &outline, config.most_tokens)?;
    let of = PassPolicy {
        policy: &policy,
        trainables,
        outline,
        alignment: Alignment::Centre,
        encode: &|task, state, shown| prompts.encode(task, state, shown.len()),
        pad: PAD,
        recompute: Recompute::None,
        device,
    };
    pass::run(job, inputs, of)
}

/// What the directory of PaliGemma says, which has to be of the images that the policy sees.
pub(super) fn outline<B: Tape<Base = B>>(
    files: PolicyFiles<'_>,
    config: &Pi05Config,
    models: Shelf<B>,
) -> Result<JointOutline, ModelError> {
    let family = models.joint.of(files.backbone)?;
    let outline = family.outline(files.backbone, Pi05Config::within())?;
    match outline.image_side == config.image {
        true => Ok(outline),
        false => Err(ModelError::Config {
            path: files.directory.path.clone(),
            field: "image_resolution".into(),
            problem: format!(
                "{0} by {0}, and the vision tower of {1} takes {2} by {2}",
                config.image,
                files.backbone.display(),
                outline.image_side
            ),
        }),
    }
}
