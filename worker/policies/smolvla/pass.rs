//! One pass of a SmolVLA policy from file to file, to hold beside LeRobot's.

use coxswain_models::{
    Shelf,
    pretrained::{checkpoint::CheckpointDir, error::ModelError},
    vision_language::{PromptEncoder, PromptForm},
};
use coxswain_nn::{
    kernels::{Tape, pool},
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;

use super::{
    config::SmolVlaConfig,
    inputs::SmolVlaPrompts,
    names::RULES,
    network::SmolVla,
    tuning::{TuningSettings, tuned},
};
use crate::{
    images::Alignment,
    pass::{self, PassJob, PassPolicy},
    pass_files::PassInputs,
};

/// Samples from the noise; with recorded actions also the loss at the given times.
pub fn run<B: Tape<Base = B>>(
    job: PassJob<'_>,
    models: Shelf<B>,
    device: &B::Device,
) -> Result<(), ModelError> {
    pool::join();
    let inputs = &PassInputs::read(job.inputs)?;
    let (files, mut layout) = (job.files, TrainableLayout::default());
    let dir = &files.directory.dir;
    let config = SmolVlaConfig::of(files.directory)?;
    let outline = models.joint.of(files.backbone)?.outline(files.backbone, config.within())?;
    let tuned = tuned(dir, &config, &outline, TuningSettings::default())?;
    let policy = SmolVla::load(files, &tuned, models, &mut layout, device)?;
    let checkpoint = CheckpointDir { path: dir, rules: RULES };
    let initial = tuned.initial_values::<B>(0, &layout, checkpoint, files.dtype)?;
    let trainables = &Trainables::new(layout, initial, device);
    let form = PromptForm { template: "{task}", images: 0, max_text_tokens: None };
    let prompts = SmolVlaPrompts::open(files.backbone, &outline, config.most_tokens, &form)?;
    let of = PassPolicy {
        policy: &policy,
        trainables,
        outline,
        alignment: Alignment::End,
        encode: &|task, _, shown| prompts.encode(task, shown),
        pad: prompts.pad(),
        recompute: Recompute::None,
        device,
    };
    pass::run(job, inputs, of)
}
