//! pi0, whose weights are a formula and whose batch is pi0.5's (`make_pi.py`).

use super::*;

/// The golden policy, with its weights.
pub(super) fn policy() -> GoldenPolicy {
    let batch = pi05();
    let mut policy = GoldenPolicy::new("pi0", "../pi05/paligemma", &["expected.safetensors"]).copied();
    policy.tensors.extend(batch.given(&[]));
    policy.about["tasks"] = batch.about["tasks"].clone();
    for (there, here) in [
        ("preprocessor_step_3_normalizer", "preprocessor_step_6_normalizer"),
        ("postprocessor_step_0_unnormalizer", "postprocessor_step_0_unnormalizer"),
    ] {
        let [there, here] = [there, here].map(|name| format!("policy_{name}_processor.safetensors"));
        fs::copy(batch.dir.join(there), policy.dir.join(here)).expect("copied");
    }
    // Sizes of the expert are those of the file.
    let gate = "model.paligemma_with_expert.gemma_expert.model.layers.0.mlp.gate_proj.weight";
    write_weights(&policy.dir, &[(gate.to_owned(), vec![20, 12])]);
    write_weights(&policy.dir, &tensors(&policy.tuned(TuningSettings::default())));
    policy
}

#[test]
fn a_pass_of_pi0_from_file_to_file_gives_what_lerobot_gives() {
    let policy = policy();
    let found = policy.hold_pass();
    hold("grad", &found, gradients(&found), &policy.tensors["grad"]);
}

#[test]
fn names_and_prompts_of_pi0_are_lerobots() {
    let policy = policy();
    let case = policy.tuned(TuningSettings::default());
    let tokens = policy.about["tokens"].as_array().expect("a list");
    for (task, ids) in policy.about["tasks"].as_array().expect("a list").iter().zip(tokens) {
        let task = task.as_str().expect("a text");
        let found = case.prompts().encode_observed(task, &[4.0; 6], &[]).expect("it fits");
        assert_eq!(json!(found), *ids, "{task}");
    }
    // LeRobot's class counts the table once more, as PaliGemma's head.
    let head = case.outline.vocab_size * case.outline.layer.width;
    let elements = tensors(&case).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>();
    assert_eq!(Some((elements + head) as u64), policy.about["parameters"].as_u64());
    for name in ["time_mlp_in.weight", "action_time_mlp_in.weight", "model.action_time_mlp_in.weight"] {
        assert_eq!((case.kind.rules().canonical)(name), "model.action_time_mlp_in.weight");
    }
}
