//! Who may only look cannot stop a run, with real processes: floods of reads by a token with the scope
//! `read`.

use std::{fs, thread, time::Duration};

use coxswain_identity::{Scope, Token, Tokens};

use crate::support::{
    CoxProcess, cox,
    flood::{Flood, Question},
    free_endpoint,
    processes::worker_of,
    tiny::{self, Tiny},
};

/// Longer than any silence that a worker may keep, twice.
const FLOODED: Duration = Duration::from_secs(6);

#[test]
fn a_flood_of_reads_loses_no_worker_and_stops_no_step() {
    let (tiny, endpoint, dir) = (Tiny::new(100_000, 0), free_endpoint(), tempfile::tempdir().unwrap());
    let file = dir.path().join("tokens");
    let [all, read] = [Scope::All, Scope::Read].map(|scope| Token::fresh(scope).expect("randomness"));
    [&all, &read].iter().for_each(|token| Tokens::add_to_file(&file, token).expect("a file"));
    let mut command = tiny.command(&["--rdzv-endpoint", &endpoint, "train.log_every=1"]);
    command.env("COX_TOKEN_FILE", &file);
    let mut running = CoxProcess::of(command);
    running.wait_for("2/100000");
    let workers = [0, 1].map(|rank| worker_of(running.pid(), rank));
    let log = tiny.output().join("logs/coordinator.log");
    let lines = || fs::read_to_string(&log).expect("a log").lines().count();
    for question in [Question::Status, Question::Ledger] {
        let before = lines();
        let flood = Flood::start(&endpoint, read.secret(), question, 100, 1_000);
        // The fault itself: nobody can be asked when it has lasted long enough.
        thread::sleep(FLOODED);
        let during = lines();
        let answered = flood.end();
        assert!(during > before + 5, "{question:?}: steps went on: {before} and {during} lines");
        assert!(answered > 100, "{question:?}: {answered} calls");
        assert_eq!(workers, [0, 1].map(|rank| worker_of(running.pid(), rank)), "{question:?}: workers live");
    }
    // A reader that comes back when it is told to has its answer, though it shares the token.
    let ask = |words: &[&str], token: &Token| {
        let asked = cox(words).args(["--endpoint", &endpoint]).env("COX_TOKEN", token.secret()).output();
        let asked = asked.expect("cox was built");
        assert!(asked.status.success(), "{words:?}: {}", String::from_utf8_lossy(&asked.stderr));
    };
    ask(&["status"], &read);
    ask(&["stop"], &all);
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
    let audit = tiny::audit(&tiny.output());
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{audit:#}");
    let told = fs::read_to_string(&log).expect("a log");
    let refused = told.lines().filter(|line| line.contains("read calls refused")).count();
    assert!((1..=2).contains(&refused), "a line a minute: {refused}");
}
