//! Runs of pi0.5: its prompts tell the state, its values are normalised by quantiles, and its loss counts the
//! steps that an episode does not have. And of pi0, whose state is a token.

use coxswain_policies::{PolicyKind, directory::PI0, export::PROCESSORS};

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
    let descended = descend(&built, &batch, 0.02, 8);
    let losses = &descended.0;
    assert!(losses[7] < losses[0], "{losses:?}");
    let left = hold_left(&built, &descended, |policy| pi05(policy, &[]));
    let directory = PolicyDirectory::from_dir(&left.path().join("policy")).expect("it is read");
    let kept = directory.kept_by(PROCESSORS[0], "normalizer_processor").expect("there");
    assert_eq!((kept["action.q01"].len(), kept["observation.state.q99"].len()), (4, 4));
}

#[test]
fn a_run_of_pi0_is_planned_learns_and_leaves_a_policy_that_another_run_starts_from() {
    let golden = Path::new(PI05).with_file_name("pi0").join("policy");
    let other = [("data.normalization", json!({"state": "mean_std", "action": "mean_std"}))];
    let directory = PolicyDirectory::from_dir(&golden).expect("it is read");
    assert_eq!(directory.kind(), PI0);
    assert_eq!(PolicyKind::from_directory(&directory).expect("it is read").class()[1], "PI0Policy");
    let (built, batch) = hold_prediction(&pi05(&golden, &other));
    let descended = descend(&built, &batch, 0.02, 8);
    let losses = &descended.0;
    assert!(losses[7] < losses[0], "{losses:?}");
    hold_left(&built, &descended, |policy| pi05(policy, &other));
}

#[test]
fn keys_and_values_that_were_kept_have_the_bits_of_live_ones() {
    let exact = [("cache.mode", json!("exact")), ("cache.tap", json!("final"))];
    hold_kept(&of_golden(&exact));
    let modes = [("data.normalization", json!({"state": "mean_std", "action": "mean_std"}))];
    let pi0 = Path::new(PI05).with_file_name("pi0").join("policy");
    hold_kept(&pi05(&pi0, &[&modes[..], &exact].concat()));
}

#[test]
fn what_was_kept_of_another_state_is_no_samples_own() {
    let samples = VlaFlow::<Flex>::default().open(&of_golden(&[])).expect("it opens");
    let inputs = |index| samples.read(index).expect("it is read").inputs();
    let beside = |index, inputs| samples.read_beside(index, inputs).expect("it is read");
    let own = beside(20, inputs(20)).expect("its own");
    assert_eq!(own.inputs().ids, inputs(20).ids);
    assert_ne!(inputs(0).ids, inputs(20).ids, "of one episode and task, in two states");
    assert!(beside(20, inputs(0)).is_none());
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
        assert!(message.contains("expert.loss") && message.contains("is `openpi`"), "{message}");
    }
}
