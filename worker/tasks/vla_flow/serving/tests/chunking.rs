//! Chunks that go on from the one before.

use super::*;

/// A frame's observation, with what is left of the last chunk and how many of its actions are taken
/// meanwhile.
fn going_on(frame: usize, left: &[f32], delay: i64) -> NamedValues {
    let mut named = observation(frame);
    named.insert("prev_actions".into(), Value::numbers(vec![left.len() / 2, 2], left.to_vec()));
    named.insert("inference_delay".into(), Value::Integer(delay));
    named
}

fn assert_goes_on(responder: &PolicyResponder) {
    let plain = answers(responder, &FRAMES.map(observation));
    let left = &plain[0][2..];
    let found = answers(responder, &[observation(2), going_on(2, left, 2), going_on(2, left, 0)]);
    assert_near(&found[..1], &plain[1..2], 1e-6);
    let [cold, held, soft] = &found[..] else { panic!("three answers") };
    for (held, left) in held[..4].iter().zip(left) {
        assert!((held - left).abs() < 1e-4 * (1.0 + left.abs()), "{held} {left}");
    }
    assert_ne!(held[4..6], left[4..6], "it may move");
    let jump = |chunk: &[f32]| (chunk[0] - left[0]).abs() + (chunk[1] - left[1]).abs();
    assert!(jump(soft) > 0.0 && jump(soft) != jump(cold), "nothing is taken meanwhile: all of it may move");
}

#[test]
fn a_chunk_begins_with_the_actions_that_are_taken_meanwhile() {
    let run = Run::new();
    let responder = run.responder();
    assert_goes_on(&responder);
    let of = |change: &dyn Fn(&mut NamedValues)| {
        let mut named = observation(2);
        change(&mut named);
        answers(&responder, &[named])
    };
    let first = of(&|_| {});
    assert_eq!(first, of(&|named| drop(named.insert("inference_delay".into(), Value::Integer(3)))));
    let none = |named: &mut NamedValues| {
        named.insert("prev_actions".into(), Value::numbers(vec![0, 2], Vec::new()));
    };
    assert_eq!(first, of(&none), "nothing is left of it");
    let left = [0.5, -0.5, 0.25, 0.0];
    let cut = |rows: i64| {
        let mut named = going_on(2, &left, 4);
        named.insert("execution_horizon".into(), Value::Integer(rows));
        answers(&responder, &[named]).remove(0)
    };
    assert_near(&[cut(1)[..2].to_vec(), cut(9)[..4].to_vec()], &[left[..2].to_vec(), left.to_vec()], 1e-5);
    assert_ne!(cut(1)[2..4], left[2..]);
    let told = responder.reader().describe();
    assert_eq!(told["optional"]["prev_actions"]["shape"], json!([null, 2]));
}

#[test]
fn differences_are_taken_from_the_state_that_is_observed_now() {
    let run = Run::made(&[], |vla| {
        vla.data.delta_actions = vec![false, true];
        vla.data.normalization.state = coxswain_data::NormMode::Identity;
    });
    assert_goes_on(&run.responder());
}

#[test]
fn what_is_left_of_a_chunk_is_checked() {
    let reader = Run::new().responder().reader();
    for (name, value, wanted) in [
        ("prev_actions", Value::numbers(vec![2, 3], vec![0.0; 6]), "expected numbers [n, 2]"),
        ("prev_actions", Value::numbers(vec![5, 2], vec![0.0; 10]), "n at most 4"),
        ("prev_actions", Value::numbers(vec![1, 2], vec![0.0, f32::NAN]), "element 1 is NaN"),
        ("prev_actions", Value::Text("none".into()), "expected numbers [n, 2]"),
        ("inference_delay", Value::Integer(-1), "expected a whole number >= 0"),
        ("execution_horizon", Value::Integer(0), "expected a whole number >= 1"),
    ] {
        let mut named = going_on(0, &[0.0; 4], 1);
        named.insert(name.into(), value);
        let refused = reader.read(&named).expect_err(wanted).to_string();
        assert!(refused.contains(name) && refused.contains(wanted), "{refused}");
    }
}
