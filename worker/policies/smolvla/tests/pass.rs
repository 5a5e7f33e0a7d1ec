//! One pass from file to file, against LeRobot's of the same policy and inputs.

use super::*;

#[test]
fn a_pass_from_file_to_file_gives_what_lerobot_gives() {
    golden().hold_pass();
}

#[test]
fn inputs_that_do_not_fit_are_refused_by_name() {
    let policy = golden();
    let tasks = &policy.about["tasks"].to_string()[..];
    let whole = policy.given(&[]);
    let mut narrow = whole.clone();
    narrow.get_mut("observation.state").expect("there").0 = vec![6, 2];
    let cameras: Vec<_> = whole.keys().map(|name| &name[..]).filter(|name| name.contains("camera")).collect();
    let cases = [
        (policy.given(&["noise"]), tasks, false, "`noise`: missing; expected shape [2, 5, 32]"),
        (policy.given(&["time"]), tasks, false, "`time`: missing"),
        (policy.given(&["action", "time"]), tasks, true, "`action`: missing; --gradients"),
        (policy.given(&cameras), tasks, false, "camera1, observation.images.camera2"),
        (narrow, tasks, false, "`observation.state`: shape [6, 2]; expected [2, 6]"),
        (whole.clone(), "open it", false, "`tasks`: missing; expected a JSON list"),
        (whole.clone(), "[]", false, "`tasks`: an empty list"),
    ];
    for (tensors, tasks, gradients, wanted) in cases {
        let message = policy.forward_of(&tensors, tasks, gradients).expect_err(wanted);
        assert!(message.contains("in.safetensors") && message.contains(wanted), "{message}");
    }
}
