//! Gradients of what LeRobot's default does not train.

use coxswain_nn::{
    lora::{Lora, LoraTargets},
    params::{Group, ParamSpec},
};
use coxswain_policies::TuningSettings;

use crate::{
    off,
    policy::{Tensors, TunedPolicy, golden},
};

const TOLERANCE: f32 = 1e-3;
/// As the fixture's adapters were made.
const ADAPTED: &str = concat!(
    r".*(text_model|lm_expert|connector)\..*proj|",
    r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out)"
);

/// The golden batch's loss, and each gradient against LeRobot's of the name that `called` gives it; how far
/// the worst is off.
fn hold(
    tuned: &TunedPolicy,
    reference: &Tensors,
    called: impl Fn(&ParamSpec) -> Option<String>,
) -> (f64, f32) {
    let (loss, mut grads) = tuned.gradients(&tuned.batch(&golden("expected.safetensors")));
    let layout = tuned.trainables.layout();
    let mut worst = 0.0f32;
    for param in layout.params() {
        let Some(name) = called(param) else { continue };
        let found = &grads.values_mut()[param.range()];
        match reference.get(&name) {
            Some((_, expected)) => {
                let off = off(found, expected);
                assert!(off <= TOLERANCE, "{name}: off by {off:e} of its largest value");
                worst = worst.max(off);
            }
            None => assert!(found.iter().all(|value| *value == 0.0), "{name}: LeRobot has no gradient"),
        }
    }
    (loss, worst)
}

#[test]
fn the_language_model_has_lerobots_gradients_in_whole_and_in_part() {
    let (reference, expected) = (golden("gradients.safetensors"), golden("expected.safetensors"));
    let loss_there = f64::from(expected["loss"].1[0]);
    let named = |param: &ParamSpec| (param.group == Group::BASE).then(|| format!("full.{}", param.name));
    let all = reference.keys().filter(|name| name.starts_with("full.")).count();
    for (train, trained) in [
        (&[r"vlm\.model\.(text_model|connector)"][..], all),
        (&[r"text_model\.layers\.[12]"], 2 * 9),
        (&[r"text_model\.layers\.3\.self_attn\.k_proj", "embed_tokens"], 2),
    ] {
        let train: Vec<String> = train.iter().map(ToString::to_string).collect();
        let tuned = TunedPolicy::load(TuningSettings { lora: None, train: &train });
        let of_vlm = tuned.trainables.layout().params().iter().filter_map(named);
        assert_eq!(of_vlm.filter(|name| reference.contains_key(name)).count(), trained, "{train:?}");
        let (loss, worst) = hold(&tuned, &reference, named);
        println!("{train:?}: gradients off by at most {worst:.1e}");
        assert!((loss / loss_there - 1.0).abs() < 1e-5, "{loss} and {loss_there}");
    }
}

#[test]
fn adapters_in_both_streams_have_the_gradients_that_peft_gives_them() {
    let reference = golden("gradients.safetensors");
    let targets = LoraTargets::Regex(ADAPTED.into());
    let lora = Lora { rank: 2, alpha: 6.0, targets, ..Lora::default() };
    let mut tuned = TunedPolicy::load(TuningSettings { lora: Some(&lora), train: &[] });
    let given = reference.keys().filter(|name| name.starts_with("lora.base_model.")).count();
    let params = tuned.trainables.layout().params();
    assert_eq!(params.len(), given);
    let values = params.iter().flat_map(|param| reference[&format!("lora.{}", param.name)].1.clone());
    tuned.trainables.set(values.collect());
    let (loss, worst) = hold(&tuned, &reference, |param| Some(format!("lora.grad.{}", param.name)));
    println!("{given} matrices: gradients off by at most {worst:.1e}");
    let loss_there = f64::from(reference["lora.loss"].1[0]);
    assert!((loss / loss_there - 1.0).abs() < 1e-5, "{loss} and {loss_there}");
}
