//! Policies that see features side by side, no state, or the past.

use super::{super::observed::ObservedSample, *};
use crate::vla_flow::data::{Sample, collate};
use coxswain_models::families::shelf;

const CAMERAS: [&str; 2] = ["observation.images.front", "observation.images.wrist"];
const STATE: &str = "observation.state";

fn asked(run: &Run, named: &NamedValues) -> Sample {
    let request = run.responder().reader().read(named).unwrap_or_else(|error| panic!("{error}"));
    request.content::<ObservedSample>().sample.clone()
}

fn refusal(run: &Run, named: &NamedValues) -> String {
    let Err(error) = run.responder().reader().read(named) else { panic!("accepted") };
    error.to_string()
}

/// The model sees of an observation what it has seen of the recording.
#[track_caller]
fn is_sample(run: &Run, named: &NamedValues, index: u64) {
    let (asked, trained) = (asked(run, named), run.dataset.sample(index).unwrap());
    assert_eq!((&asked.input_ids, &asked.image_shapes), (&trained.input_ids, &trained.image_shapes));
    assert!(asked.pixel_values == trained.pixel_values, "images differ");
    assert_eq!((asked.state, asked.sensor), (trained.state, trained.sensor));
}

/// Values of several frames, with an axis of frames in front.
fn stacked(frames: &[usize], name: &str) -> Value {
    let all: Vec<_> = frames.iter().map(|&frame| observation(frame).remove(name).unwrap()).collect();
    let with = |shape: &[usize]| [&[frames.len()], shape].concat();
    match &all[0] {
        Value::Bytes(first) => Value::bytes(
            with(&first.shape),
            all.iter()
                .flat_map(|of| if let Value::Bytes(of) = of { of.values.clone() } else { vec![] })
                .collect(),
        ),
        Value::Numbers(first) => Value::numbers(
            with(&first.shape),
            all.iter()
                .flat_map(|of| if let Value::Numbers(of) = of { of.values.clone() } else { vec![] })
                .collect(),
        ),
        other => other.clone(),
    }
}

#[test]
fn a_policy_of_images_alone_answers_without_a_state_and_looks_at_none() {
    let run = Run::made(&[], |vla| vla.data.state = std::iter::empty().collect());
    let (with, mut without) = (observation(2), observation(2));
    without.remove(STATE);
    is_sample(&run, &without, 2);
    assert_eq!(asked(&run, &with), asked(&run, &without));
    let responder = run.responder();
    assert!(responder.reader().describe()["inputs"].get(STATE).is_none());
    let found = answers(&responder, &[without]).remove(0);
    let (policy, ..) =
        Policy::<Flex>::load(&run.spec, shelf(), run.dataset.dims(), &Default::default()).unwrap();
    let trainables = Trainables::new(run.layout.clone(), run.values.clone(), &Default::default());
    let batch = collate(Step(0), &[run.dataset.sample(2).unwrap()], 0);
    let mut expected = policy.sample_actions(&trainables, &batch, run.spec.run.seed).unwrap();
    run.dataset.denormalize_actions(&mut expected);
    assert_eq!(found, expected);
}

#[test]
fn a_policy_that_sees_the_past_is_given_it_the_oldest_frame_first() {
    let run = Run::made(&[], |vla| vla.observation.history = vec![-2, -1]);
    for (index, frames) in [(3, [1, 2, 3]), (1, [0, 0, 1])] {
        let mut named = observation(index);
        for name in CAMERAS.into_iter().chain([STATE]) {
            named.insert(name.into(), stacked(&frames, name));
        }
        is_sample(&run, &named, index as u64);
    }
    let text = refusal(&run, &observation(3));
    assert!(
        text.contains("expected uint8 [3, 30, 40, 3] (frames, height, width, RGB)")
            || text.contains("expected numbers [3, 3]"),
        "{text}"
    );
    let about = run.responder().reader().describe();
    assert_eq!((&about["history"], &about["inputs"][STATE]["shape"]), (&json!([-2, -1]), &json!([3, 3])));
    assert_eq!(answers(&run.responder(), &[run.responder().reader().example()])[0].len(), 4 * 2);
}

#[test]
fn features_side_by_side_are_given_by_their_names() {
    let run = Run::made(&[], |vla| {
        vla.data.state = ["action", STATE].map(str::to_owned).into_iter().collect();
        vla.observation.history = vec![-1];
    });
    let mut named = observation(3);
    for name in CAMERAS.into_iter().chain([STATE]) {
        named.insert(name.into(), stacked(&[2, 3], name));
    }
    let actions = [2, 3].into_iter().flat_map(|frame| recording::action(0, frame)).collect();
    named.insert("action".into(), Value::numbers(vec![2, 2], actions));
    is_sample(&run, &named, 3);
    let about = run.responder().reader().describe();
    assert_eq!(about["inputs"]["action"], json!({"dtype": "float32", "shape": [2, 2], "feature": "action"}));
    named.insert(STATE.into(), Value::numbers(vec![2, 2], vec![0.0; 4]));
    let text = refusal(&run, &named);
    assert!(
        text.contains("found 4 + 4 numbers, but action + observation.state has the shape [2, 5]"),
        "{text}"
    );
    named.insert(STATE.into(), Value::numbers(vec![6], vec![0.0; 6]));
    assert!(
        refusal(&run, &named)
            .contains("found float32 [6]; expected numbers (all parts together have shape [2, 5])")
    );
}

#[test]
fn a_window_of_rows_and_a_limit_of_the_text_hold_for_observations() {
    let run = Run::made(&[], |vla| {
        let (key, window) = ("action".to_owned(), Some(2));
        vla.data.sensor = Some(crate::vla_flow::config::SensorFeature { key, window });
        vla.observation.max_text_tokens = Some(2);
    });
    let mut named = observation(3);
    let readings = [2, 3].into_iter().flat_map(|frame| recording::action(0, frame)).collect();
    named.insert("action".into(), Value::numbers(vec![2, 2], readings));
    is_sample(&run, &named, 3);
}
