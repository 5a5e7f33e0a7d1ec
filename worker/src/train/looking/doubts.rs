//! What of a run is probably not meant so, though it can be run: told by `cox check`, and where a run begins.

use coxswain_proto::{plan::Plan, run_spec::RunSpec};
use coxswain_task::Samples;

/// Peak rates from here on have no use in AdamW: an update moves each weight by about as much, whatever its
/// gradient.
const RATE: f64 = 1.0;

/// What is probably not meant so: of the data, and of what is asked of it.
pub(in crate::train) fn warnings(spec: &RunSpec, samples: &dyn Samples) -> Vec<String> {
    let every = spec.eval.every;
    let without = (every > 0 && samples.holdout().is_empty()).then(|| {
        format!(
            "eval.every is {every}, but no sample is held out: nothing is evaluated, and no best checkpoint is kept; hold some out, for \
             instance with data.holdout_episodes"
        )
    });
    let steps = Plan::new(&spec.train, samples.epoch_len()).map_or(u64::MAX, |plan| plan.total_steps());
    let asked = rates(spec).chain(warm_up(spec, steps)).chain(batch(spec, samples.epoch_len()));
    samples.warnings().into_iter().chain(without).chain(asked).collect()
}

fn batch(spec: &RunSpec, epoch: u64) -> Option<String> {
    let asked = spec.train.global_batch as u64;
    (asked > epoch).then(|| {
        format!("train.global_batch is {asked}, but an epoch has {epoch} samples: each step uses all of them")
    })
}

fn rates(spec: &RunSpec) -> impl Iterator<Item = String> {
    let rates = spec.learning_rates().into_iter().filter(|(_, rate)| *rate >= RATE);
    rates.map(|(group, rate)| {
        format!(
            "optimizer.lr.{group} is {rate:?}: AdamW moves each weight by about the learning rate in every step, and a run with {RATE} or more diverges; usual rates are 1e-5 to 1e-2"
        )
    })
}

fn warm_up(spec: &RunSpec, steps: u64) -> Option<String> {
    let longest = spec.optimizer.warmup_steps.values().into_iter().map(|(_, steps)| steps).max()?;
    (longest >= steps).then(|| {
        format!(
            "optimizer.warmup_steps is {longest}, but the run has {steps} steps: the run ends before the learning rates reach their peaks"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(keys: serde_json::Value) -> RunSpec {
        let mut spec = serde_json::json!({
            "run": {"name": "a", "output_dir": "a"},
            "data": {"path": "d"},
            "train": {"steps": 10, "global_batch": 8, "micro_batch": 2},
        });
        spec.as_object_mut().expect("a map").extend(keys.as_object().expect("a map").clone());
        serde_json::from_value(spec).expect("it is complete")
    }

    #[test]
    fn rates_that_no_run_survives_and_a_warm_up_beyond_the_end_are_told() {
        let usual = spec(serde_json::json!({"optimizer": {"warmup_steps": 9, "lr": {"lora": 1e-4}}}));
        assert_eq!((rates(&usual).count(), warm_up(&usual, 10)), (0, None));
        let odd =
            spec(serde_json::json!({"optimizer": {"warmup_steps": 10, "lr": {"lora": 10.0, "base": 1e300}}}));
        assert_eq!(rates(&odd).count(), 2);
        assert!(warm_up(&odd, 10).is_some_and(|told| told.contains("has 10 steps")));
    }

    #[test]
    fn a_batch_beyond_the_data_is_told() {
        let eight = spec(serde_json::json!({}));
        assert_eq!(batch(&eight, 8), None);
        assert!(batch(&eight, 7).is_some_and(|told| told.contains("an epoch has 7 samples")));
    }
}
