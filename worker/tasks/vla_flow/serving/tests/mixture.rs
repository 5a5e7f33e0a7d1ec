//! A policy of two data sets, acting for the robot of either.

use super::{super::observed::ObservedSample, *};
use crate::vla_flow::{
    data::{RunData, collate},
    flow::starting_noise,
    testing::pair::{FRONT, TwoSets},
};
use coxswain_models::Shelves;
use coxswain_models::families::shelf;

/// Values of an action to which those of both sets are padded.
const WIDEST: usize = 3;

/// What a robot of a set sees in frame 2 of its first episode, by the names of that set.
fn seen(set: usize, noise: &[f32]) -> NamedValues {
    let mut named = observation(2);
    let own = WIDEST - 1 + set;
    named.insert("noise".into(), Value::numbers(vec![4, own], noise.to_vec()));
    if set == 1 {
        named.remove(FRONT);
        let action = recording::action(0, 2).to_vec();
        named.insert("action".into(), Value::numbers(vec![2], action));
    }
    named
}

#[test]
fn each_robot_is_answered_by_its_own_statistics_cameras_and_widths() {
    let (mut pair, dir) = (TwoSets::new(|_| {}), tempfile::tempdir().unwrap());
    pair.spec.vla_mut().lora = None;
    let (mixture, device) = (pair.mixture(), Default::default());
    let Assembly { objective, layout, initial } =
        TaskOn::<Flex>::build(&VlaFlow::<Flex>::default(), &pair.spec, &mixture, &device).unwrap();
    let values: Vec<f32> = (0..).zip(&initial).map(|(at, value)| value + 0.05 * (at as f32).sin()).collect();
    objective.export(dir.path(), &layout, &values).unwrap();
    for file in Samples::files(&mixture) {
        let path = dir.path().join(file.path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, file.text).unwrap();
    }
    let open = |spec: &RunSpec| PolicyResponder::load::<Flex>(spec, Shelves::default(), dir.path(), &device);
    let Err(error) = open(&pair.spec) else { panic!("it says for whom") };
    assert!(error.to_string().contains("--set NAME`, where NAME is one of lab, field"), "{error}");

    for (set, (name, index)) in [("lab", 2), ("field", 17 + 2)].into_iter().enumerate() {
        pair.spec.vla_mut().serve.set = Some(name.into());
        let responder = open(&pair.spec).unwrap_or_else(|error| panic!("{error}"));
        let own = WIDEST - 1 + set;
        let noise = starting_noise(9, &[index], 4 * own);
        let request = responder.reader().read(&seen(set, &noise)).unwrap_or_else(|error| panic!("{error}"));
        let trained = mixture.sample(index).unwrap();
        let asked = &request.content::<ObservedSample>().sample;
        assert_eq!((&asked.input_ids, &asked.pixel_values), (&trained.input_ids, &trained.pixel_values));
        assert_eq!((&asked.state, asked.action_width), (&trained.state, trained.action_width));
        // Without noise of its own a request is answered from that of an evaluation's sample of its seed.
        let mut quiet = seen(set, &noise);
        quiet.remove("noise");
        let drawn = responder.reader().read(&quiet).unwrap_or_else(|error| panic!("{error}"));
        let evaluated = starting_noise(pair.spec.run.seed, &[2], 4 * WIDEST);
        let drawn = &drawn.content::<ObservedSample>().sample.actions;
        for (drawn, evaluated) in drawn.chunks(WIDEST).zip(evaluated.chunks(WIDEST)) {
            assert_eq!(drawn[..own], evaluated[..own]);
            assert!(drawn[own..].iter().all(|padding| *padding == 0.0));
        }
        let dims = responder.reader().describe()["outputs"]["actions"]["shape"].clone();
        assert_eq!(dims, json!([4, own]));

        let Value::Numbers(found) =
            responder.answer(&[request]).unwrap().remove(0).remove("actions").unwrap()
        else {
            panic!("actions are numbers")
        };
        let (policy, ..) =
            Policy::<Flex>::load(&pair.spec, shelf(), RunData::dims(&mixture), &device).unwrap();
        let trainables = Trainables::new(layout.clone(), values.clone(), &device);
        let padded =
            noise.chunks(own).flat_map(|step| (0..WIDEST).map(|at| step.get(at).copied().unwrap_or(0.0)));
        let batch = collate(Step(0), &[trained], 0);
        let mut expected =
            policy.sample_actions_from(&trainables, &batch, padded.collect::<Vec<_>>().into()).unwrap();
        assert!(expected.chunks(WIDEST).all(|action| action[own..].iter().all(|padding| *padding == 0.0)));
        RunData::denormalize_actions(&mixture, index, &mut expected);
        let expected: Vec<f32> = expected.chunks(WIDEST).flat_map(|action| &action[..own]).copied().collect();
        assert_eq!((found.shape, found.values), (vec![4, own], expected), "{name}");
    }
}
