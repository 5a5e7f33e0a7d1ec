//! What else trains than LeRobot's default: adapters in either stream, the language model in full or in part.
//!
//! Where adapters are beside modules in full, differences of the loss along random directions say what the
//! gradients are.

use coxswain_nn::{
    lora::{Lora, LoraTargets, linear::peft_keys},
    params::{Group, ParamSpec},
    rng::{Key, Purpose},
};

use coxswain_models::pretrained::prompts::DropoutKeys;

use super::*;

/// As the fixture's adapters were made.
const ADAPTED: &str = concat!(
    r".*(text_model|lm_expert|connector)\..*proj|",
    r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out)"
);

#[test]
fn the_language_model_and_adapters_have_lerobots_gradients_in_whole_and_in_part() {
    let policy = golden();
    let whole = policy.hold_gradients(r"vlm\.model\.(text_model|connector)", ADAPTED);
    for (train, count) in [
        (&[r"text_model\.layers\.[12]"][..], 2 * 9),
        (&[r"text_model\.layers\.3\.self_attn\.k_proj", "embed_tokens"], 2),
    ] {
        let train: Vec<String> = train.iter().map(ToString::to_string).collect();
        let asked = TuningSettings { lora: None, train: &train };
        let (found, params) = policy.tuned(asked).passed(Recompute::None, |_| ());
        assert_eq!(params.iter().filter(|param| param.group == Group::BASE).count(), count, "{train:?}");
        for name in params.iter().map(|param| format!("grad.{}", param.name)) {
            close(&name, &found[&name].1, &whole[&name].1, VALUES);
        }
    }
}

/// Adapters of rank 2 on what an expression means.
fn lora(targets: &str) -> Lora {
    Lora { rank: 2, alpha: 6.0, targets: LoraTargets::Regex(targets.into()), ..Lora::default() }
}

fn asked<'s>(lora: &'s Lora, train: &'s [String]) -> TuningSettings<'s> {
    TuningSettings { lora: Some(lora), train }
}

fn named<'t>(trainables: &'t Trainables<Flex>, name: &str) -> &'t ParamSpec {
    let layout = trainables.layout();
    layout.get(layout.find(name).unwrap_or_else(|| panic!("{name} trains")))
}

/// Numbers of a normal distribution, of their number alone.
fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; count];
    Key { seed, purpose: Purpose::Init, step: 0, sample: 0, repeat: 0 }.draws().normal(&mut values);
    values
}

/// Gradients are equal in every mode, to the bit, and along random directions in the parameters that
/// `wanted` means they are the slope of the loss.
fn gradients_are_slopes(policy: &dyn Policy<Flex>, trainables: &mut Trainables<Flex>, wanted: &[&str]) {
    let expected = golden();
    let step = Step::of(&expected, &config());
    let [mut grads, mut again] = [Recompute::None, Recompute::Full]
        .map(|recompute| step.gradients(policy, trainables, Training { recompute, dropout: None }).1);
    let grads = grads.values_mut().clone();
    assert_eq!(&grads, again.values_mut(), "recompute changes nothing");
    let values = trainables.to_vec();
    for (seed, wanted) in wanted.iter().enumerate() {
        let params: Vec<_> = trainables
            .layout()
            .params()
            .iter()
            .filter(|param| param.name.contains(wanted))
            .cloned()
            .collect();
        assert!(!params.is_empty(), "{wanted}");
        let mut direction = vec![0.0; values.len()];
        for param in &params {
            direction[param.range()].copy_from_slice(&normal(param.len(), seed as u64 + 1));
        }
        let slope: f64 = direction.iter().zip(&grads).map(|(d, g)| f64::from(*d) * f64::from(*g)).sum();
        let mut loss_at = |step_size: f32| {
            let moved = values.iter().zip(&direction).map(|(v, d)| v + step_size * d).collect();
            trainables.set(moved);
            step.loss_of(policy, trainables)
        };
        // Two steps, of which the error in the second power cancels.
        let difference = |size: f32, loss_at: &mut dyn FnMut(f32) -> f64| {
            (loss_at(size) - loss_at(-size)) / (2.0 * f64::from(size))
        };
        let (coarse, fine) = (difference(8e-3, &mut loss_at), difference(4e-3, &mut loss_at));
        let found = (4.0 * fine - coarse) / 3.0;
        println!("{wanted}: slope {slope:.6}, by differences {found:.6}");
        assert!((slope - found).abs() < 2e-3 * slope.abs().max(0.02), "{wanted}: {slope} {found}");
        trainables.set(values.clone());
    }
}

#[test]
fn adapters_are_on_lerobots_targets_by_default() {
    let lora = Lora { rank: 2, alpha: 6.0, ..Lora::default() };
    let (_, trainables) = policy_of(asked(&lora, &[]));
    let params = trainables.layout().params().iter();
    // Queries and values of four layers, five projections.
    assert_eq!(params.filter(|param| param.name.ends_with(".lora_B.weight")).count(), 4 * 2 + 5);
}

#[test]
fn adapters_in_both_streams_beside_modules_in_full_have_slopes_as_gradients() {
    let lora = lora(r".*(text_model.*|lm_expert.*|connector.*)_proj|.*connector.*proj|model\.action_in_proj");
    let train = ["state_proj", r"layers\.1\.input_layernorm", "embed_tokens"].map(str::to_owned);
    let (policy, mut trainables) = policy_of(asked(&lora, &train));
    // Away from zero, so that both matrices have gradients.
    let values: Vec<f32> = trainables.to_vec();
    let moved = values.iter().zip(normal(values.len(), 9)).map(|(v, d)| v + 0.05 * d).collect();
    trainables.set(moved);
    let slopes = [
        "text_model.layers.0.self_attn.q_proj.lora_A",
        "text_model.layers.2.mlp.down_proj.lora_B",
        "text_model.layers.3.self_attn.v_proj.lora_B",
        "lm_expert.layers.1.self_attn.k_proj.lora_A",
        "connector.modality_projection.proj.lora_A",
        "action_in_proj.lora_B",
        "state_proj.weight",
        "text_model.layers.1.input_layernorm.weight",
        "embed_tokens.weight",
    ];
    gradients_are_slopes(&*policy, &mut trainables, &slopes);
    // What nothing reads of the last layer has an adapter, as PEFT has, which neither learns nor decays.
    let unread =
        named(&trainables, &peft_keys("model.vlm_with_expert.vlm.model.text_model.layers.3.mlp.up_proj")[0]);
    assert!(!unread.decay && unread.group == Group::LORA);
    let read =
        named(&trainables, &peft_keys("model.vlm_with_expert.vlm.model.text_model.layers.2.mlp.up_proj")[0]);
    assert!(read.decay);
}

#[test]
fn the_language_model_trains_in_full_but_for_what_nothing_reads() {
    let train = [r"vlm\.model\.(text_model|connector)".to_owned()];
    let (policy, trainables) = policy_of(TuningSettings { lora: None, train: &train });
    let layout = trainables.layout();
    let of_vlm: Vec<_> = layout.params().iter().filter(|param| param.group == Group::BASE).collect();
    // Three layers of nine tensors, three of the last one, the table, the connector.
    assert_eq!(of_vlm.len(), 3 * 9 + 3 + 2);
    let unread = [
        "layers.3.self_attn.o_proj",
        "layers.3.self_attn.q_proj",
        "layers.3.mlp",
        "text_model.norm",
        "lm_head",
    ];
    for name in unread {
        assert!(
            layout.params().iter().all(|param| !param.name.contains(&format!("vlm.model.text_model.{name}"))),
            "{name}"
        );
    }
    let (_, grads) = Step::of(&golden(), &config()).gradients(&*policy, &trainables, PLAIN);
    let silent: Vec<_> = layout.params().iter().filter(|param| !grads.touched(param)).collect();
    assert!(silent.is_empty(), "without a gradient: {silent:?}");
}

#[test]
fn a_configuration_that_trains_the_language_model_is_followed() {
    let mut directory = PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read");
    let names = |directory: &PolicyDirectory| {
        let tuned = tuned_of(directory, TuningSettings::default()).expect("the default");
        tuned.full.iter().filter(|name| name.contains(".vlm.")).count()
    };
    assert_eq!(names(&directory), 0);
    directory.json["train_expert_only"] = json!(false);
    // LeRobot leaves the last layer out.
    assert_eq!(names(&directory), 3 * 9 + 2);
    directory.json["freeze_vision_encoder"] = json!(false);
    let message = SmolVlaConfig::from_directory(&directory).expect_err("no tower trains").to_string();
    assert!(message.contains("freeze_vision_encoder"), "{message}");
}

#[test]
fn what_dropout_drops_does_not_depend_on_recompute() {
    let lora = Lora { dropout: 0.4, ..lora(".*(text_model|lm_expert).*_proj") };
    let (policy, mut trainables) = policy_of(asked(&lora, &[]));
    let moved = trainables.to_vec().iter().map(|value| value + 0.05).collect();
    trainables.set(moved);
    let expected = golden();
    let step = Step::of(&expected, &config());
    let with = |seed, recompute| {
        let keys = DropoutKeys { seed, step: 3, samples: &[4, 5], images_per_row: &[2, 1] };
        let (loss, mut grads) =
            step.gradients(&*policy, &trainables, Training { recompute, dropout: Some(keys) });
        (loss, grads.values_mut().clone())
    };
    let (loss, grads) = with(1, Recompute::None);
    assert_eq!((loss, grads), with(1, Recompute::Full));
    assert_ne!(loss, with(2, Recompute::None).0, "the seed decides");
    assert_ne!(loss, step.loss_of(&*policy, &trainables), "what does not train drops nothing");
}

#[test]
fn kept_features_give_the_bits_of_the_pixels() {
    let expected = golden();
    let step = Step::of(&expected, &config());
    for (targets, of) in [
        (".*(text_model|lm_expert).*_proj", KeptTokens::Images(4)),
        (".*lm_expert.*_proj", KeptTokens::KeysValues),
    ] {
        let lora = lora(targets);
        let (policy, trainables) = policy_of(asked(&lora, &[]));
        let features = vector(policy.features(&trainables, step.batch.observed(), of).expect("it fits"));
        let kept = |values| {
            let observed = step.batch.observed();
            let prompts = Prompts { pixel_values: &[], ..observed.prompts };
            PolicyObservation { prompts, features: Some(KeptFeatures { of, values }), ..observed }
        };
        let through = |observed| policy.forward_kept(&trainables, PLAIN, observed, step.draws());
        let velocity = |observed| vector(through(observed).expect("it fits").0);
        assert_eq!(velocity(step.batch.observed()), velocity(kept(&features)), "{of:?}");
        assert!(through(kept(&features[1..])).is_err());
    }
}

#[test]
fn what_cannot_train_is_refused_by_key() {
    let directory = PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read");
    let refused = |lora: Option<Lora>, train: &str| {
        let train: Vec<String> = (!train.is_empty()).then(|| train.to_owned()).into_iter().collect();
        tuned_of(&directory, TuningSettings { lora: lora.as_ref(), train: &train }).err().expect("refused")
    };
    for (lora, train, parts) in [
        (
            Some(Lora { targets: LoraTargets::Suffixes(vec!["q_proj".into()]), ..lora("") }),
            "",
            ["lora.targets", "vision_model"],
        ),
        (Some(lora(".*lm_head")), "", ["lora.targets", "lm_head"]),
        (Some(lora("nothing")), "", ["lora.targets", "nothing"]),
        (None, "vision_model", ["model.train", "vision tower"]),
        (None, r"text_model\.norm", ["model.train", r"text_model\.norm"]),
        (Some(lora(".*lm_expert.*q_proj")), "lm_expert", ["model.train", "q_proj"]),
    ] {
        let message = refused(lora, train);
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}
