//! Steps against `torch.optim.AdamW` with `clip_grad_norm_`, from fixtures.

use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use super::*;

struct Golden {
    meta: Value,
    bytes: Vec<u8>,
}

impl Golden {
    fn read(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures/zero").join(name);
        let bytes = std::fs::read(path).expect("the fixture is in the repository");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        let metadata = header.metadata().as_ref().expect("it has metadata");
        Self { meta: serde_json::from_str(&metadata["fixture"]).expect("JSON"), bytes }
    }

    fn tensor(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        let tensor = file.tensor(name).expect("the fixture has it");
        tensor.data().as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    fn number(&self, name: &str) -> f64 {
        self.meta[name].as_f64().expect("a number")
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        self.meta[name].as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
    }

    fn layout(&self) -> TrainableLayout {
        let mut layout = TrainableLayout::default();
        for param in self.meta["params"].as_array().expect("a list") {
            let shape: Vec<usize> = param[1]
                .as_array()
                .expect("a shape")
                .iter()
                .map(|v| v.as_u64().expect("a size") as usize)
                .collect();
            let group = match param[2].as_str().expect("a group") {
                "lora" => Group::LORA,
                "expert" => Group("expert"),
                _ => Group("sensor"),
            };
            let name = param[0].as_str().expect("a name").to_owned();
            layout.add(name, &shape, group, param[3].as_bool().expect("a flag"), Init::Zeros);
        }
        layout
    }

    fn settings(&self) -> Optimizer {
        let betas = self.numbers("betas");
        Optimizer {
            betas: [betas[0], betas[1]],
            eps: self.number("eps"),
            weight_decay: PerGroup::All(self.number("weight_decay")),
            clip_norm: PerGroup::All(self.number("clip_norm")),
            ..Optimizer::default()
        }
    }

    fn input(&self, step: usize) -> StepInput {
        let multiplier = self.numbers("multipliers")[step];
        let peak = |group: &str| self.meta["peak"][group].as_f64().expect("a rate") * multiplier;
        let rates = Rates::from(["lora", "expert", "sensor"].map(|group| (group, peak(group))));
        let rests = |steps: &Vec<Value>| steps.contains(&step.into());
        let resting = self.meta["resting"].as_array().is_some_and(rests).then_some(Group::LORA);
        StepInput { scale: self.number("scale"), rates, resting }
    }
}

fn relative_error(ours: &[f32], theirs: &[f32]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut ours.iter().zip(theirs).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut theirs.iter().map(|b| f64::from(*b)))
}

#[test]
fn it_repeats_torch_with_groups_decay_and_clipping_at_every_world_size() {
    repeats_torch(&Golden::read("adamw.safetensors"));
}

/// In the steps where the group rests its gradients are handed over all the same: they must not count.
#[test]
fn a_group_that_rests_is_as_without_gradient_in_torch() {
    let golden = Golden::read("resting.safetensors");
    assert!(golden.input(2).resting == Some(Group::LORA) && golden.input(1).resting.is_none());
    repeats_torch(&golden);
}

fn repeats_torch(golden: &Golden) {
    let layout = golden.layout();
    for world in 1..=3 {
        let ranks = on_ring(world, |rank, comm| {
            let mut optimizer = ShardedOptimizer::new(&layout, world, Rank(rank as u32), &golden.settings());
            let mut weights = golden.tensor("initial");
            for (step, norm) in golden.numbers("norms").into_iter().enumerate() {
                // Each rank brings its share of the gradient; a power of two would hide the order of
                // additions.
                let share = [0.5, 0.3, 0.2][rank] / [0.5f32, 0.8, 1.0][world - 1];
                let mut grads: Vec<_> =
                    golden.tensor(&format!("grads.{step}")).iter().map(|g| g * share).collect();
                let outcome =
                    optimizer.step(&mut grads, &mut weights, &golden.input(step), comm).expect("a step");
                assert!((outcome.grad_norm / norm - 1.0).abs() < 1e-6, "{} for {norm}", outcome.grad_norm);
                assert_eq!(outcome.clipped, norm > golden.number("clip_norm"));
                let error = relative_error(&weights, &golden.tensor(&format!("weights.{step}")));
                assert!(error < 1e-6, "step {step} in a world of {world}: {error:e}");
            }
            optimizer
        });
        let (exp_avg, exp_avg_sq) = moments(&ranks);
        assert!(relative_error(&exp_avg, &golden.tensor("exp_avg")) < 1e-6);
        assert!(relative_error(&exp_avg_sq, &golden.tensor("exp_avg_sq")) < 1e-6);
    }
}
