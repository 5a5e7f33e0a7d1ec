//! Training from a run spec alone: a world of one, in this process, without a coordinator.

use std::{fs, path::Path};

use coxswain_proto::{ids::Step, plan::Plan, run_spec::RunSpec};
use coxswain_worker::{
    link::SoloLink,
    train::Summary,
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
    RunSpec::load(&root.join("configs/quickstart.yaml"), &all).expect("the quickstart is valid")
}

/// Trains to the end; what the run's `summary.json` says.
pub fn train(trainer: &mut dyn Trainer, spec: &RunSpec, first_step: u64) -> Summary {
    let facts = trainer.open(spec).expect("the data set opens");
    let plan = Plan::new(&spec.train, facts.training_samples).expect("the plan is possible");
    let link = SoloLink::new(Step(first_step)).with_cache(&spec.cache, &plan);
    let outcome = trainer.train(spec, Box::new(link));
    assert_eq!(outcome, TrainerOutcome::Done);
    let text = fs::read_to_string(Path::new(&spec.run.output_dir).join("summary.json"));
    serde_json::from_str(&text.expect("a summary was written")).expect("of the right shape")
}
