//! What a panic inside rav1d costs.

use std::{
    env, fs, panic,
    path::Path,
    process::{self, Command},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use super::dav1d::sabotage::TO_PANIC;
use crate::error::Fault;
use crate::index::Video;
use crate::limits::MAX_GIVEN_UP;
use crate::pool::DecoderPool;

fn open(file: &str) -> Video {
    Video::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(file)).expect("it ships")
}

/// Threads of decoders that there are. One that was joined stands in its process's list until the kernel has
/// put it away: for as long as there are more than `expected` they are counted again, 10 seconds at most.
fn threads(expected: usize) -> usize {
    let begun = Instant::now();
    loop {
        let tasks = fs::read_dir("/proc/self/task").expect("this is Linux");
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let count = names.filter(|name| name.trim_end() == "av1").count();
        if count <= expected || begun.elapsed() > Duration::from_secs(10) {
            return count;
        }
        thread::yield_now();
    }
}

const NAME: &str = "av1::tests::a_panic_of_rav1d_costs_its_frames_and_a_thread_until_there_were_too_many";
const CHILD: &str = "COX_VIDEO_TEST_PANICS";

/// In a process of its own: what it counts is the process's, and the test harness could not end after it,
/// since it takes the panic hook when all tests are done.
#[test]
fn a_panic_of_rav1d_costs_its_frames_and_a_thread_until_there_were_too_many() {
    if env::var_os(CHILD).is_some() {
        process::exit(i32::from(panic::catch_unwind(panics_are_outlived).is_err()));
    }
    let program = env::current_exe().expect("this program");
    let child = Command::new(program).args(["--exact", NAME, "--nocapture"]).env(CHILD, "1").output();
    let child = child.expect("it starts");
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    assert!(child.stderr.is_empty(), "nothing is printed: {}", String::from_utf8_lossy(&child.stderr));
}

fn panics_are_outlived() {
    let (one, other) = (open("av1_g2.mp4"), open("av1_98x70.mp4"));
    let frames = [0, 1, 4, 5];
    let whole = |video: &Video| DecoderPool::new(1).rgb(video, &frames);
    let (of_one, of_other) = (whole(&one), whole(&other));
    assert!(of_one.iter().chain(&of_other).all(Result::is_ok));
    assert_eq!(threads(0), 0, "a decoder that is closed leaves no thread");

    let pool = DecoderPool::new(2);
    assert_eq!(pool.rgb(&one, &frames), of_one);
    TO_PANIC.store(1, Ordering::Relaxed);
    let error = pool.rgb(&other, &[1]).remove(0).expect_err("its decoder panics");
    assert_eq!(error.frame, Some(1));
    assert!(
        error.to_string().contains(
            "frame 1: damaged picture: the decoder panicked on it: no memory for a picture, dav1d.rs:"
        ),
        "{error}"
    );
    // The decoder that stood open goes on, and a new one stands in for the one that is lost.
    assert_eq!(pool.rgb(&one, &frames), of_one);
    assert_eq!(pool.rgb(&other, &frames), of_other);
    assert_eq!((pool.open_count(), threads(3)), (2, 3));

    // The next two: the run in which a decoder panics costs its own frames alone.
    TO_PANIC.store(1, Ordering::Relaxed);
    let again = DecoderPool::new(1).rgb(&one, &frames);
    assert!(again[..2].iter().all(Result::is_err) && again[2..] == of_one[2..], "{again:?}");

    TO_PANIC.store(usize::MAX, Ordering::Relaxed);
    for _ in 2..MAX_GIVEN_UP {
        let error = DecoderPool::new(1).rgb(&one, &[0]).remove(0).expect_err("its decoder panics");
        assert!(matches!(error.fault, Fault::Picture(_)), "{error}");
    }
    TO_PANIC.store(0, Ordering::Relaxed);
    let refused = DecoderPool::new(1).rgb(&one, &[0]).remove(0).expect_err("there were too many");
    assert_eq!(refused.fault, Fault::GivenUp { times: MAX_GIVEN_UP });
    assert_eq!(pool.rgb(&other, &frames), of_other, "those that are open go on");
    drop(pool);
    assert_eq!(threads(MAX_GIVEN_UP), MAX_GIVEN_UP);
}
