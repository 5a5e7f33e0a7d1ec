//! The same of pi0.5: its prompts tell the state, its values are normalised by quantiles, and its loss counts
//! the steps that an episode does not have.

use coxswain_policies::export::PROCESSORS;

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
    let dir = tempfile::tempdir().expect("a directory for the test");
    let written = built.objective.export(dir.path(), &built.layout, &trained).expect("it is written");
    assert!(written.iter().all(|artifact| dir.path().join(artifact.path).is_file()));
    let out = dir.path().join("policy");
    let directory = PolicyDirectory::open(&out).expect("it is read");
    let kept = directory.kept_by(PROCESSORS[0], "normalizer_processor").expect("there");
    assert_eq!((kept["action.q01"].len(), kept["observation.state.q99"].len()), (4, 4));
    let (again, batch) = self::built(&pi05(&out, &[])).expect("it is built");
    let rounded = again.initial.iter().zip(&trained).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0);
    assert!(rounded, "values are those that were trained, as bfloat16");
    let trainables = Trainables::<Flex>::new(again.layout, again.initial, &Default::default());
    let loss = again.objective.loss(&trainables, &batch).expect("it fits");
    assert!((loss.loss_sum / loss.valid - losses[7]).abs() < 0.2 * losses[7], "{loss:?} after {losses:?}");
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
}

#[test]
fn what_a_run_of_pi05_will_take_is_known_before_and_other_settings_are_refused() {
    let task = VlaFlow::<Flex>::default();
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": ".*(language_model|gemma_expert.model).*_proj"});
    let ask = |micro_batch| Ask { micro_batch, world: 1, rank: 0, place: Place::Host { threads: 1 } };
    for spec in [of_golden(&[]), of_golden(&[("lora", lora)])] {
        let subject = task.sizes(&spec).expect("it is read");
        let [one, four] = [1, 4].map(|samples| subject.predict(ask(samples)));
        assert!(four.kept > one.kept && one.kept > 0);
        let (built, _) = built(&spec).expect("it is built");
        let rows = built.objective.modules(&built.layout);
        let kept: u64 = rows.iter().filter(|row| !row.trains).map(|row| row.bytes).sum();
        assert_eq!(one.of(Category::FrozenWeights), kept);
    }
    for (key, value) in [
        ("data.normalization", json!({"state": "mean_std", "action": "quantiles"})),
        ("data.horizon", json!(4)),
        ("model.train", json!(["vision_tower"])),
        ("model.train", json!(["embed_tokens"])),
    ] {
        let message = built(&of_golden(&[(key, value)])).err().expect(key);
        assert!(message.contains(key), "{key}: {message}");
    }
}
