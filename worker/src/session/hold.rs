//! A hook for tests: a worker that stands still where it is told to, so that a fault can be injected at a
//! phase too short to hit.
//!
//! With `COX_TEST_HOLD=DIR` in its environment, a worker that enters a phase looks for the file
//! `DIR/RANK-PHASE` (`1-backward`), which holds the first step it is meant for. It renames the file to
//! `DIR/RANK-PHASE.held`, which tells the test that it stands there, and goes on when that file is gone. Each
//! file is obeyed once. Without the variable nothing is looked for.
//!
//! It is part of every build because the tests that need it (`integration-tests/processes` and `net`) drive
//! the `cox` that users get, of any version: behind a cargo feature, they would have to build another
//! program, and would no longer test this one.
//!
//! Only the trainer's thread stands still: heartbeats go on, as from a worker that hangs. In `joining` the
//! whole process does, before it has made itself known.

use std::{path::PathBuf, sync::LazyLock, time::Duration};

use coxswain_proto::ids::Step;

use crate::link::Phase;

/// Between two looks at whether to go on.
const LOOK: Duration = Duration::from_millis(2);

struct Hold {
    directory: PathBuf,
    rank: String,
}

static HOLD: LazyLock<Option<Hold>> = LazyLock::new(|| {
    let directory = std::env::var_os("COX_TEST_HOLD").filter(|directory| !directory.is_empty())?;
    let rank = std::env::var("RANK").unwrap_or_else(|_| "0".to_owned());
    Some(Hold { directory: directory.into(), rank })
});

/// Stands still if a test wants it to, here and now.
pub(super) fn at(phase: Phase, step: Step) {
    if let Some(hold) = &*HOLD {
        hold.at(phase, step);
    }
}

impl Hold {
    fn at(&self, phase: Phase, step: Step) {
        let name = format!("{}-{}", self.rank, format!("{phase:?}").to_lowercase());
        let (order, held) = (self.directory.join(&name), self.directory.join(name + ".held"));
        let Ok(first) = std::fs::read_to_string(&order) else { return };
        if step.0 < first.trim().parse().unwrap_or(0) || std::fs::rename(&order, &held).is_err() {
            return;
        }
        while held.exists() {
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_still_once_from_the_named_step_on_until_it_is_released() {
        let dir = tempfile::tempdir().expect("a directory");
        let hold = Hold { directory: dir.path().to_owned(), rank: "1".into() };
        let (order, held) = (dir.path().join("1-backward"), dir.path().join("1-backward.held"));
        std::fs::write(&order, "3").expect("a file");
        hold.at(Phase::Backward, Step(2));
        hold.at(Phase::Forward, Step(3));
        assert!(order.exists() && !held.exists(), "too early, or another phase");
        std::thread::scope(|scope| {
            let standing = scope.spawn(|| hold.at(Phase::Backward, Step(3)));
            while !held.exists() {
                std::thread::yield_now();
            }
            assert!(!standing.is_finished());
            std::fs::remove_file(&held).expect("it is there");
        });
        hold.at(Phase::Backward, Step(4));
        assert!(!order.exists() && !held.exists(), "obeyed once");
    }
}
