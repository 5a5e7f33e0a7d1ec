//! pi0, whose weights are a formula and whose batch is pi0.5's; and gradients of either policy, of which the
//! reference has the size and how much of three waves is in it (`make_pi.py`).

use tempfile::TempDir;

use super::*;
use crate::golden::{hold, wave, write_weights};

const PI0: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/pi0");
const EXPECTED: &str = "expected.safetensors";

fn by_formula(name: &str, shape: &[usize]) -> Vec<f32> {
    let behind: usize = shape[1..].iter().product();
    let value = |v: f64| match name {
        _ if name.ends_with("bias") => v * 0.05,
        _ if name.contains("layer_norm") || name.contains("post_layernorm") => 1.0 + v * 0.1,
        _ if name.contains("norm") => v * 0.1,
        _ if name.contains("position_embedding") => v * 0.3,
        _ if name.contains("lora_A") => v * 0.25,
        _ if name.contains("lora_B") => v * 0.1,
        _ => v / (behind as f64).sqrt(),
    };
    wave(name, shape.iter().product()).into_iter().map(|v| value(v) as f32).collect()
}

/// The golden policy's directory, with its weights.
fn policy() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory for the test");
    for file in ["config.json", "policy_preprocessor.json", "policy_postprocessor.json"] {
        fs::copy(Path::new(PI0).join("policy").join(file), dir.path().join(file)).expect("copied");
    }
    for (there, here) in [
        ("preprocessor_step_3_normalizer", "preprocessor_step_6_normalizer"),
        ("postprocessor_step_0_unnormalizer", "postprocessor_step_0_unnormalizer"),
    ] {
        let [there, here] = [there, here].map(|name| format!("policy_{name}_processor.safetensors"));
        fs::copy(policy_dir().join(there), dir.path().join(here)).expect("copied");
    }
    // Sizes of the expert are those of the file.
    let gate = "model.paligemma_with_expert.gemma_expert.model.layers.0.mlp.gate_proj.weight";
    write_weights(dir.path(), &[(gate.to_owned(), vec![20, 12])], by_formula);
    let case = Case::of(dir.path(), TuningSettings::default());
    write_weights(dir.path(), &tensors(&case), by_formula);
    dir
}

fn tensors(case: &Case) -> Vec<(String, Vec<usize>)> {
    [&case.outline.tensors[..], &case.config.own_tensors(&case.outline)].concat()
}

#[test]
fn a_pass_of_pi0_from_file_to_file_gives_what_lerobot_gives() {
    let ((expected, _), dir) = (golden_at(PI0, EXPECTED), policy());
    let found = forward(dir.path(), true, &[]);
    for name in ["loss", "velocity"] {
        close(name, &found[name].1, &expected[name].1, VALUES);
    }
    close("normalized", &found["actions.normalized"].1, &expected["sampled.normalized"].1, ACTIONS);
    close("actions", &found["actions"].1, &expected["sampled"].1, ACTIONS);
    let named = found.iter().filter_map(|(name, (_, g))| Some((name.strip_prefix("grad.")?.to_owned(), g)));
    hold("grad", &named.collect(), &expected["grad"]);
}

#[test]
fn language_model_and_adapters_of_both_policies_have_lerobots_gradients_in_every_mode() {
    let train = [r"paligemma\.model\.(language_model\.layers|multi_modal_projector)".to_owned()];
    let lora = Lora { rank: 2, alpha: 6.0, targets: LoraTargets::Regex(ADAPTED.into()), ..Lora::default() };
    let pi0 = policy();
    for (dir, there, file) in [(pi0.path(), PI0, EXPECTED), (&*policy_dir(), AT, "gradients.safetensors")] {
        let ((expected, _), (reference, _)) = (golden_at(there, EXPECTED), golden_at(there, file));
        let whole = Case::of(dir, TuningSettings { lora: None, train: &train });
        let adapted = Case::of(dir, TuningSettings { lora: Some(&lora), train: &[] });
        for (mut case, group, loss, name) in [
            (whole, Group::BASE, &expected["loss"].1, "full"),
            (adapted, Group::LORA, &reference["lora.loss"].1, "lora.grad"),
        ] {
            let mut modes = Vec::new();
            for recompute in [Recompute::None, Recompute::Full] {
                case.recompute = recompute;
                let (found, params) = case.passed(|trainables| {
                    if group == Group::LORA {
                        let params = trainables.layout().params().iter();
                        let values = params.flat_map(|param| by_formula(&param.name, &param.shape)).collect();
                        trainables.set(values);
                    }
                });
                close("loss", &found["loss"].1, loss, VALUES);
                let of_group = params.iter().filter(|param| param.group == group);
                let named =
                    of_group.map(|param| (param.name.clone(), &found[&format!("grad.{}", param.name)].1));
                hold(name, &named.collect(), &reference[name]);
                modes.push(found);
            }
            assert_eq!(modes[0], modes[1], "recompute changes nothing");
        }
    }
}

#[test]
fn names_and_prompts_of_pi0_are_lerobots() {
    let ((_, about), dir) = (golden_at(PI0, EXPECTED), policy());
    let case = Case::of(dir.path(), TuningSettings::default());
    let kind = PolicyKind::Pi(case.config.clone());
    let prompts = kind.prompts(&case.backbone, &case.outline, &FORM).expect("it is read");
    let (_, of_batch) = golden(EXPECTED);
    for (task, ids) in
        of_batch["tasks"].as_array().expect("a list").iter().zip(about["tokens"].as_array().expect("a list"))
    {
        let found = prompts.encode_observed(task.as_str().expect("a text"), &[4.0; 6], &[]).expect("it fits");
        assert_eq!(json!(found), *ids, "{task}");
    }
    // LeRobot's class counts the table once more, as PaliGemma's head.
    let head = case.outline.vocab_size * case.outline.layer.width;
    let elements = tensors(&case).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>();
    assert_eq!(Some((elements + head) as u64), about["parameters"].as_u64());
    for name in ["time_mlp_in.weight", "action_time_mlp_in.weight", "model.action_time_mlp_in.weight"] {
        assert_eq!((kind.rules().canonical)(name), "model.action_time_mlp_in.weight");
    }
}
