//! Training from a run spec alone: a world of one, in this process, without a coordinator.

use std::{fs, path::Path};

use coxswain_proto::{ids::Step, plan::Plan, run_spec::RunSpec};
use coxswain_worker::{
    link::{Link, SoloLink},
    train::{Summary, checkpoint::Store},
    trainer::{Trainer, TrainerOutcome},
};

use crate::repository;

/// The quickstart, changed, into a directory.
pub fn quickstart(output: &Path, overrides: &[&str]) -> RunSpec {
    let root = repository();
    let path = |relative: &str| root.join(relative).display().to_string();
    let mut all = vec![
        format!("run.output_dir={}", output.display()),
        format!("model.path={}", path("configs/assets/tiny-vla")),
        format!("data.path={}", path("configs/assets/metaworld-mini")),
        "eval.samples=4".to_owned(),
        "optimizer.warmup_steps=2".to_owned(),
    ];
    all.extend(overrides.iter().map(ToString::to_string));
    RunSpec::load(&root.join("configs/quickstart.yaml"), &all, coxswain_tasks::TASKS)
        .expect("the quickstart is valid")
}

/// Trains from the checkpoint of `first_step`, or afresh, over whatever `link` makes of the null object.
pub fn outcome(
    trainer: &mut dyn Trainer,
    spec: &RunSpec,
    first_step: u64,
    link: impl FnOnce(SoloLink, &Plan) -> Box<dyn Link + Send>,
) -> TrainerOutcome {
    let facts = trainer.open(spec).expect("the data set opens");
    let plan = Plan::new(&spec.train, facts.training_samples).expect("the plan is possible");
    let complete = Store::new(Path::new(&spec.run.output_dir)).complete().expect("readable");
    let from = complete.into_iter().find(|found| found.manifest.step == first_step);
    let decided = from.and_then(|found| found.manifest.cache_phase);
    let solo = SoloLink::new(Step(first_step)).with_cache(&spec.cache, &plan, decided);
    trainer.train(spec, link(solo, &plan))
}

/// Trains to the end; what the run's `summary.json` says.
pub fn train(trainer: &mut dyn Trainer, spec: &RunSpec, first_step: u64) -> Summary {
    assert_eq!(outcome(trainer, spec, first_step, |link, _| Box::new(link)), TrainerOutcome::Done);
    summary(spec)
}

/// What a run has left.
pub fn summary(spec: &RunSpec) -> Summary {
    let text = fs::read_to_string(Path::new(&spec.run.output_dir).join("summary.json"));
    serde_json::from_str(&text.expect("a summary was written")).expect("of the right shape")
}
