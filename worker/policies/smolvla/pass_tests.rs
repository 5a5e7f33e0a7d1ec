//! One pass from file to file, against LeRobot's of the same policy and inputs.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

use burn::backend::Flex;
use coxswain_models::families::shelf;
use coxswain_nn::{
    dtypes::FrozenDtype,
    files::{floats, read_tensors},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::{PassJob, PolicyFiles, directory::PolicyDirectory, pass};

const AT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/smolvla");

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// What LeRobot was given and found, images in 0..1, and the tasks as JSON.
fn golden() -> (Tensors, String) {
    let bytes = fs::read(Path::new(AT).join("expected.safetensors")).expect("part of the repository");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("safetensors");
    let about: serde_json::Value =
        serde_json::from_str(&header.metadata().as_ref().expect("it has some")["about"]).expect("JSON");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let read = |(name, view): (String, TensorView<'_>)| {
        let most =
            if name.starts_with("observation.images") && !name.ends_with("mask") { 255.0 } else { 1.0 };
        let bytes = || view.data().iter().map(|byte| f32::from(*byte) / most).collect();
        (view.dtype() != Dtype::I32)
            .then(|| (name, (view.shape().to_vec(), floats(&view).unwrap_or_else(bytes))))
    };
    (file.tensors().into_iter().filter_map(read).collect(), about["tasks"].to_string())
}

/// What a pass over these inputs writes, or its error.
fn passed(tensors: &Tensors, tasks: &str, gradients: bool) -> Result<Tensors, String> {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let (inputs, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let all: Vec<_> = tensors
        .iter()
        .map(|(name, (shape, values))| {
            (name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
        })
        .collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, (*shape).clone(), bytes).expect("its shape"))
    });
    let metadata = HashMap::from([("tasks".to_owned(), tasks.to_owned())]);
    safetensors::serialize_to_file(views, Some(metadata), &inputs).expect("written");
    let directory = PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read");
    let backbone = &Path::new(AT).join("vlm");
    let files = PolicyFiles { directory: &directory, backbone, dtype: FrozenDtype::Float32 };
    let job = PassJob { files, inputs: &inputs, out: &out, gradients };
    pass::run::<Flex>(job, shelf(), &Default::default()).map_err(|error| error.to_string())?;
    let found = read_tensors(&out).expect("written");
    Ok(found.into_iter().map(|tensor| (tensor.name, (tensor.shape, tensor.values))).collect())
}

const TAKEN: [&str; 8] = [
    "observation.images.camera1",
    "observation.images.camera2",
    "observation.images.camera2_padding_mask",
    "observation.state",
    "action",
    "action_is_pad",
    "noise",
    "time",
];

fn inputs(golden: &Tensors, without: &[&str]) -> Tensors {
    let taken = |(name, _): &(&String, _)| TAKEN.contains(&&name[..]) && !without.contains(&&name[..]);
    golden.iter().filter(taken).map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
}

#[test]
fn a_pass_from_file_to_file_gives_what_lerobot_gives() {
    let (golden, tasks) = golden();
    let found = passed(&inputs(&golden, &[]), &tasks, true).expect("it runs");
    let close = |name: &str, of: &str, most: f32| {
        let ((shape, values), (expected_shape, expected)) = (&found[name], &golden[of]);
        assert!(shape == expected_shape || (shape.is_empty() && *expected_shape == [1]), "{name}: {shape:?}");
        let largest = expected.iter().fold(1e-12f32, |most, value| most.max(value.abs()));
        let off = values.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(off <= most * largest, "{name}: {off:e} of {largest:e}");
    };
    for name in ["loss", "losses", "velocity"] {
        close(name, name, 1e-5);
    }
    close("actions.normalized", "sampled.normalized", 1e-4);
    close("actions", "sampled", 1e-4);
    let gradients: Vec<_> = golden.keys().filter(|name| name.starts_with("grad.")).collect();
    assert_eq!(found.len(), 5 + gradients.len());
    gradients.iter().for_each(|name| close(name, name, 1e-4));
}

#[test]
fn without_recorded_actions_there_are_sampled_ones_alone() {
    let (golden, tasks) = golden();
    let alone = passed(&inputs(&golden, &["action", "action_is_pad", "time"]), &tasks, false);
    let names: Vec<_> = alone.expect("it runs").into_keys().collect();
    assert_eq!(names, ["actions", "actions.normalized"]);
}

#[test]
fn inputs_that_do_not_fit_are_refused_by_name() {
    let (golden, tasks) = golden();
    let tasks = &tasks[..];
    let mut narrow = inputs(&golden, &[]);
    narrow.get_mut("observation.state").expect("there").0 = vec![6, 2];
    let whole = inputs(&golden, &[]);
    let cases = [
        (inputs(&golden, &["noise"]), tasks, false, "`noise`: missing; expected [2, 5, 32]"),
        (inputs(&golden, &["time"]), tasks, false, "`time`: missing"),
        (inputs(&golden, &["action", "time"]), tasks, true, "`action`: missing; gradients"),
        (inputs(&golden, &TAKEN[..2]), tasks, false, "camera1, observation.images.camera2"),
        (narrow, tasks, false, "`observation.state`: of shape [6, 2]; expected [2, 6]"),
        (whole.clone(), "open it", false, "`tasks`: missing; expected a JSON list"),
        (whole, "[]", false, "`tasks`: an empty list"),
    ];
    for (tensors, tasks, gradients, wanted) in cases {
        let message = passed(&tensors, tasks, gradients).expect_err(wanted);
        assert!(message.contains("in.safetensors") && message.contains(wanted), "{message}");
    }
}
