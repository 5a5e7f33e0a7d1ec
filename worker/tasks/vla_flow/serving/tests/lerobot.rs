//! Policies of LeRobot's, acting by the directory that a run has left.

use coxswain_data::NormMode;
use coxswain_nn::dtypes::FrozenDtype;

use super::*;
use crate::vla_flow::{
    base::PolicyBase,
    lerobot::{POLICY_DIR, PolicyPasses, TunedPolicy},
    testing::gr00t,
};

const SMOLVLA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/smolvla");

/// Actions of a chunk.
const CHUNK: usize = 5;

/// A run on the recording from a golden policy.
fn spec(data: &Path) -> RunSpec {
    let mut spec = Recording::default().spec(data);
    let mut vla = spec.vla_mut();
    vla.model.path = format!("{SMOLVLA}/policy");
    vla.model.backbone = Some(format!("{SMOLVLA}/vlm"));
    (vla.lora, vla.data.sensor, vla.data.horizon) = (None, None, CHUNK);
    vla.expert = Default::default();
    vla.model.train.clear();
    let cameras = vla.data.cameras.clone();
    let own = (1..).map(|number| format!("observation.images.camera{number}"));
    vla.data.rename_map = cameras.into_iter().zip(own).collect();
    drop(vla);
    spec
}

/// A run of a policy of type `groot`, which knows the cameras by their names.
fn gr00t_spec(data: &Path, policy: &Path) -> RunSpec {
    let mut spec = spec(data);
    let mut vla = spec.vla_mut();
    vla.model.path = policy.display().to_string();
    vla.model.backbone = Some(format!("{}/backbone", gr00t::GR00T));
    vla.data.rename_map.clear();
    vla.data.normalization.state = NormMode::MinMaxClamped;
    vla.data.normalization.action = NormMode::MinMaxClamped;
    drop(vla);
    spec
}

/// The one answer's actions.
fn acted(responder: &PolicyResponder, named: &NamedValues) -> Vec<f32> {
    let request = responder.reader().read(named).unwrap_or_else(|error| panic!("{error}"));
    match responder.answer(&[request]).unwrap().remove(0).remove("actions") {
        Some(Value::Numbers(Array { shape, values, .. })) => {
            assert_eq!(shape, [CHUNK, 2]);
            values
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_frame_is_answered_as_evaluation_answers_its_sample_and_from_noise_of_the_padded_width() {
    let (data, policy) = (Recording::default().write(), gr00t::policy(0.0));
    hold_answers(&spec(data.path()), 32);
    hold_answers(&gr00t_spec(data.path(), policy.path()), 7);
}

/// What a run leaves answers as evaluation does, from noise of this width, and goes on from a chunk.
fn hold_answers(spec: &RunSpec, padded: usize) {
    let (dir, device) = (tempfile::tempdir().unwrap(), Default::default());
    let dataset = Dataset::from_spec(spec, shelf()).unwrap();
    let Assembly { objective, layout, initial } =
        TaskOn::<Flex>::build(&VlaFlow::<Flex>::default(), spec, &dataset, &device).unwrap();
    let open = || PolicyResponder::load::<Flex>(spec, Shelves::default(), dir.path(), &device);
    let error = open().err().expect("there is nothing yet").to_string();
    assert!(error.contains("policy") && error.contains("cox export"), "{error}");
    objective.export(dir.path(), &layout, &initial).unwrap();
    let responder = open().unwrap_or_else(|error| panic!("{error}"));

    let mut settings = VlaSettings::from_spec(spec).unwrap();
    settings.model.path = dir.path().join(POLICY_DIR).display().to_string();
    let base = PolicyBase::from_settings(&settings, shelf::<Sizes>()).unwrap().unwrap();
    let tuned = &base.as_published().unwrap();
    let policy = TunedPolicy { base: &base, tuned, settings: &settings };
    let loaded = PolicyPasses::<Flex>::load(spec, policy, shelf(), dataset.dims(), &device);
    let (passes, layout, values) = loaded.unwrap();
    let trainables = Trainables::new(layout, values, &device);
    for frame in FRAMES {
        let sample = [Samples::read(&dataset, frame as u64).unwrap()];
        let batch = (&dataset as &dyn Samples).batch(Step(0), &sample);
        let mut expected = passes.sample(&trainables, batch.content(), spec.run.seed).unwrap();
        dataset.denormalize_actions(&mut expected);
        let found = acted(&responder, &observation(frame));
        assert_near(&[found], &[expected], 1e-5);
    }

    let about = responder.reader().describe();
    assert_eq!(about["optional"]["noise"]["shape"], json!([CHUNK, padded]));
    assert_eq!(about["inputs"]["observation.state"]["feature"], "observation.state");
    let with = |noise: Vec<f32>| {
        let mut named = observation(2);
        named.insert("noise".into(), Value::numbers(vec![CHUNK, noise.len() / CHUNK], noise));
        named
    };
    let drawn = crate::vla_flow::flow::starting_noise(spec.run.seed, &[2], CHUNK * padded);
    assert_eq!(acted(&responder, &with(drawn)), acted(&responder, &observation(2)));
    let narrow = responder.reader().read(&with(vec![0.0; CHUNK * 2])).expect_err("too narrow").to_string();
    assert!(narrow.contains(&format!("[5, {padded}]")), "{narrow}");

    let left = &acted(&responder, &observation(0))[2..];
    let mut going_on = observation(2);
    going_on.insert("prev_actions".into(), Value::numbers(vec![CHUNK - 1, 2], left.to_vec()));
    going_on.insert("inference_delay".into(), Value::Integer(2));
    let chunk = acted(&responder, &going_on);
    assert_near(&[chunk[..4].to_vec()], &[left[..4].to_vec()], 1e-5);
    assert_ne!(chunk[4..6], left[4..6], "it may move");
}

#[test]
fn a_merged_policy_is_not_rounded_to_the_few_bits_of_its_run() {
    let (data, dir, device) =
        (Recording::default().write(), tempfile::tempdir().unwrap(), Default::default());
    let of = |dtype: FrozenDtype| {
        let mut spec = spec(data.path());
        spec.vla_mut().model.weights_dtype = dtype;
        spec
    };
    let nf4 = of(FrozenDtype::Nf4);
    let dataset = Dataset::from_spec(&nf4, shelf()).unwrap();
    let Assembly { objective, layout, initial } =
        TaskOn::<Flex>::build(&VlaFlow::<Flex>::default(), &nf4, &dataset, &device).unwrap();
    objective.export(dir.path(), &layout, &initial).unwrap();
    let acts = |dtype| {
        let opened = PolicyResponder::load::<Flex>(&of(dtype), Shelves::default(), dir.path(), &device);
        acted(&opened.unwrap_or_else(|error| panic!("{error}")), &observation(2))
    };
    assert_eq!(acts(FrozenDtype::Nf4), acts(FrozenDtype::Bfloat16));
}
