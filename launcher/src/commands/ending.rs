//! The end of a launch: its page, and its results on standard output.

use std::{path::PathBuf, time::Duration};

use coxswain_proto::human;
use tokio::{sync::oneshot, time::timeout};

use super::report;
use crate::{
    render::say,
    supervise::{
        console::{Console, Terminal},
        signals,
    },
};

/// How long a run's end waits for its report.
const PAGE_PATIENCE: Duration = Duration::from_secs(10);

/// Writes the run's page, and says where it is. Whatever is wrong with that is a line: the run has ended as
/// it has ended.
pub(super) async fn leave_page(output_dir: &str, terminal: &Terminal) -> Option<PathBuf> {
    let run = PathBuf::from(output_dir);
    let (done, left) = oneshot::channel();
    // Not one of the runtime's threads, which would be waited for.
    std::thread::spawn(move || done.send(report::leave(&run)));
    let problem = match timeout(PAGE_PATIENCE, left).await {
        Ok(Ok(Ok(page))) => return Some(page),
        Ok(Ok(Err(problem))) => problem,
        Ok(Err(_)) => "cox panicked while writing it".to_owned(),
        Err(_) => format!("writing it took longer than {}", human::time(PAGE_PATIENCE)),
    };
    terminal.line(&format!("warning: the report was not written: {problem}; run `cox report` to write it"));
    None
}

/// Prints the results; a signal ends that where standard output is not read.
pub(super) async fn hand_over(results: String) {
    let (done, handed) = oneshot::channel();
    // Not one of the runtime's threads, which would be waited for.
    std::thread::spawn(move || {
        say(results);
        done.send(())
    });
    let Ok(mut signals) = signals::catch() else { return drop(handed.await) };
    tokio::select! {
        _ = handed => {}
        _ = signals.next() => {}
    }
}
