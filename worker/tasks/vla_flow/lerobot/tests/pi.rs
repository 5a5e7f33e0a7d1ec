//! Runs of pi0.5: its prompts tell the state, its values are normalised by quantiles, and its loss counts the
//! steps that an episode does not have. And of pi0, whose state is a token.

use std::fs;

use coxswain_policies::{PolicyKind, directory::PI0, export::PROCESSORS};
use safetensors::{SafeTensors, tensor::TensorView};

use super::*;

const PI05: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/pi05");

fn pi05(policy: &Path, changes: &[(&str, Value)]) -> RunSpec {
    let own = [
        ("model.backbone", json!(format!("{PI05}/paligemma"))),
        ("data.normalization", json!({"state": "quantiles", "action": "quantiles"})),
    ];
    spec(policy, &[&own[..], changes].concat())
}

fn of_golden(changes: &[(&str, Value)]) -> RunSpec {
    pi05(&Path::new(PI05).join("policy"), changes)
}

#[test]
fn a_run_of_pi05_learns_and_leaves_a_policy_that_another_run_starts_from() {
    let (built, batch) = built(&of_golden(&[])).expect("it is built");
    let (losses, trained) = descend(&built, &batch, 0.02, 8);
    assert!(losses[7] < losses[0], "{losses:?}");
    let left = hold_left(&built, (&losses, &trained), |policy| pi05(policy, &[]));
    let directory = PolicyDirectory::from_dir(&left.path().join("policy")).expect("it is read");
    let kept = directory.kept_by(PROCESSORS[0], "normalizer_processor").expect("there");
    assert_eq!((kept["action.q01"].len(), kept["observation.state.q99"].len()), (4, 4));
}

/// A policy of type pi0 with the weights of the golden one of pi0.5, and others where it has none.
fn pi0(dir: &Path) -> RunSpec {
    let golden = Path::new(PI05).with_file_name("pi0").join("policy");
    for file in ["config.json", PROCESSORS[0], PROCESSORS[1]] {
        fs::copy(golden.join(file), dir.join(file)).expect("copied");
    }
    let statistics =
        Path::new(PI05).join("policy/policy_preprocessor_step_3_normalizer_processor.safetensors");
    for name in ["preprocessor_step_6_normalizer", "postprocessor_step_0_unnormalizer"] {
        fs::copy(&statistics, dir.join(format!("policy_{name}_processor.safetensors"))).expect("copied");
    }
    let bytes = fs::read(Path::new(PI05).join("policy/model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let shared = file.tensors().into_iter().filter(|(name, _)| !name.contains(".dense."));
    let mut tensors: Vec<_> = shared
        .map(|(name, view)| {
            (name.replace("time_mlp", "action_time_mlp"), view.shape().to_vec(), view.data().to_vec())
        })
        .filter(|(name, ..)| !name.contains("time_mlp_in.weight"))
        .collect();
    let norms = (0..3).flat_map(|layer| {
        ["input", "post_attention"].map(|norm| format!("layers.{layer}.{norm}_layernorm.weight"))
    });
    let norms = norms.chain(["norm.weight".into()]);
    let norms =
        norms.map(|name| (format!("model.paligemma_with_expert.gemma_expert.model.{name}"), vec![12]));
    let linears = [
        ("model.state_proj.weight", vec![12, 32]),
        ("model.state_proj.bias", vec![12]),
        ("model.action_time_mlp_in.weight", vec![12, 24]),
    ];
    for (name, shape) in norms.chain(linears.map(|(name, shape)| (name.to_owned(), shape))) {
        let count: usize = shape.iter().product();
        // 0.1 and -0.1, as bfloat16.
        let bytes = (0..count).flat_map(|at| [0xcd, if at % 3 == 0 { 0xbd } else { 0x3d }]).collect();
        tensors.push((name, shape, bytes));
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).expect("its shape"))
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).expect("written");
    pi05(dir, &[("data.normalization", json!({"state": "mean_std", "action": "mean_std"}))])
}

#[test]
fn a_run_of_pi0_is_planned_learns_and_leaves_a_policy_that_another_run_starts_from() {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let spec = pi0(dir.path());
    let directory = PolicyDirectory::from_dir(dir.path()).expect("it is read");
    assert_eq!(directory.kind(), PI0);
    assert_eq!(PolicyKind::from_directory(&directory).expect("it is read").class()[1], "PI0Policy");
    let (built, batch) = hold_prediction(&spec);
    let (losses, trained) = descend(&built, &batch, 0.02, 8);
    assert!(losses[7] < losses[0], "{losses:?}");
    let other = [("data.normalization", json!({"state": "mean_std", "action": "mean_std"}))];
    hold_left(&built, (&losses, &trained), |policy| pi05(policy, &other));
}

#[test]
fn prompts_of_pi05_tell_the_state_and_its_loss_counts_every_step_of_a_chunk() {
    let spec = of_golden(&[]);
    let samples = VlaFlow::<Flex>::default().open(&spec).expect("it opens");
    let dataset = samples.downcast_ref::<Dataset>().expect("one set");
    let read = |index: u64| dataset.sample(index).expect("it is read");
    let rows = [0, 20, dataset.len() - 1].map(read);
    assert_ne!(rows[0].input_ids, rows[1].input_ids, "of one episode, in two states");
    assert!(rows[2].action_is_pad.iter().any(|pad| *pad), "an episode's last frame");
    let (built, _) = built(&spec).expect("it is built");
    let batch = collate(Step(1), &rows, dataset.pad_token());
    let trainables = Trainables::<Flex>::new(built.layout, built.initial, &Default::default());
    let loss = built.objective.loss(&trainables, &batch).expect("it fits");
    assert_eq!(loss.valid, 3.0 * 5.0 * 4.0);
    // openpi counts the 28 dimensions that the data set does not have, too.
    let (openpi, _) = self::built(&of_golden(&[("expert", json!({"loss": "openpi"}))])).expect("it is built");
    let padded = openpi.objective.loss(&trainables, &batch).expect("it fits");
    assert_eq!(padded.valid, 3.0 * 5.0 * 32.0);
    let mut wide = batch;
    wide.action_widths = vec![32; 3];
    assert_eq!(padded, built.objective.loss(&trainables, &wide).expect("it fits"));
}

#[test]
fn what_a_run_of_pi05_will_take_is_known_before_and_other_settings_are_refused() {
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": ".*(language_model|gemma_expert.model).*_proj"});
    hold_prediction(&of_golden(&[]));
    hold_prediction(&of_golden(&[("lora", lora)]));
    for (key, value) in [
        ("data.normalization", json!({"state": "mean_std", "action": "quantiles"})),
        ("data.horizon", json!(4)),
        ("expert", json!({"loss": "openpi", "width": 96})),
        ("model.train", json!(["vision_tower"])),
        ("model.train", json!(["embed_tokens"])),
    ] {
        let message = built(&of_golden(&[(key, value)])).err().expect(key);
        assert!(message.contains(key), "{key}: {message}");
    }
    let openpi = [("expert", json!({"loss": "openpi"}))];
    for other in [Path::new(GOLDEN).join("policy"), Path::new(DATA).with_file_name("tiny-vla")] {
        let message = built(&spec(&other, &openpi)).err().expect("it has no such loss");
        assert!(message.contains("expert.loss") && message.contains("is openpi's"), "{message}");
    }
}
