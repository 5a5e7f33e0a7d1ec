//! What a driver says of a GPU while a worker lives: errors as they come (Xid), and what has changed since
//! the last look.
//!
//! An error that only hardware makes is a fault of the slot, as one that a health check finds; errors that a
//! program can make itself are told, and count for nothing. Numbers and meanings are those of NVIDIA's list
//! of Xid errors.

use std::{sync::Arc, time::Duration};

use super::device::{Driver, GpuHealth};
use crate::link::Report;

/// How long a critical error is waited for at a time.
const WAIT: Duration = Duration::from_secs(1);
/// Waits between two looks at what does not come by itself.
const LOOK_EVERY: u32 = 10;

/// Xids of memory that could not be corrected or remapped (48, 64, 94, 95, 140), of a link between GPUs (74)
/// and of a GPU that has left the bus (79).
const OF_HARDWARE: [u64; 7] = [48, 64, 74, 79, 94, 95, 140];

/// One GPU, as it was when it was looked at last.
struct WatchedGpu {
    before: GpuHealth,
}

impl WatchedGpu {
    /// What is new.
    fn looked(&mut self, now: GpuHealth) -> Vec<Report> {
        let before = std::mem::replace(&mut self.before, now);
        let now = &self.before;
        let known = before.faults();
        let faults = now.faults().into_iter().filter(|fault| !known.contains(fault));
        let errors = now.uncorrected_errors.saturating_sub(before.uncorrected_errors);
        let errors = (errors > 0).then(|| {
            let name = &now.name;
            format!("{name}: new uncorrectable memory errors while this worker runs: {errors}")
        });
        let faults = faults.chain(errors).map(Report::HardwareFault);
        let slowed = (before.slowed_by.is_empty() && !now.slowed_by.is_empty()).then(|| {
            Report::Note(format!("{} runs at lower clocks: {}", now.name, now.slowed_by.join(", ")))
        });
        faults.chain(slowed).collect()
    }

    /// The driver has reported an error.
    fn reported(&self, xid: u64) -> Report {
        let line = format!("{}: its driver reports Xid {xid}", self.before.name);
        match OF_HARDWARE.contains(&xid) {
            true => Report::HardwareFault(line),
            false => Report::Note(format!("{line} (`dmesg` says more)")),
        }
    }
}

/// Watches a GPU until nobody listens any more; `tell` says whether anybody does. On a thread of its own,
/// which waits in the driver and is not waited for.
pub fn follow(
    driver: Arc<dyn Driver>,
    gpu: usize,
    mut tell: impl FnMut(Vec<Report>) -> bool + Send + 'static,
) {
    let watch = move || {
        let mut watched = WatchedGpu { before: driver.health(gpu) };
        let mut waits = 0;
        loop {
            let reported = driver.critical_error(gpu, WAIT).map(|xid| watched.reported(xid));
            waits = (waits + 1) % LOOK_EVERY;
            let changed = if waits == 0 { watched.looked(driver.health(gpu)) } else { Vec::new() };
            if !tell(reported.into_iter().chain(changed).collect()) {
                return;
            }
        }
    };
    // A machine without threads has other worries.
    let _ = std::thread::Builder::new().name("gpu".into()).spawn(watch);
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use super::*;

    fn gpu(errors: u64) -> GpuHealth {
        GpuHealth { name: "GPU 3".into(), uncorrected_errors: errors, ..GpuHealth::default() }
    }

    fn lines(reports: &[Report]) -> Vec<(bool, &str)> {
        let lines = reports.iter().map(|report| match report {
            Report::HardwareFault(line) => (true, line.as_str()),
            Report::Note(line) => (false, line.as_str()),
            _ => panic!("nothing else is told"),
        });
        lines.collect()
    }

    #[test]
    fn what_was_so_when_the_worker_came_is_no_news_and_what_comes_later_is_told_once() {
        let mut watched = WatchedGpu { before: gpu(2) };
        assert!(watched.looked(gpu(2)).is_empty());
        let told = watched.looked(gpu(5));
        assert!(matches!(lines(&told)[..], [(true, line)] if line.ends_with("this worker runs: 3")));
        let pending = GpuHealth { pages_pending: true, slowed_by: vec!["heat"], ..gpu(5) };
        let told = watched.looked(pending.clone());
        let [(true, pages), (false, slow)] = lines(&told)[..] else { panic!("two are new") };
        assert!(pages.contains("retired") && slow == "GPU 3 runs at lower clocks: heat");
        assert!(watched.looked(pending).is_empty());
    }

    #[test]
    fn errors_that_a_program_can_make_count_for_nothing() {
        let watched = WatchedGpu { before: gpu(0) };
        let told = [13, 31, 48, 79].map(|xid| watched.reported(xid));
        assert_eq!(
            lines(&told).iter().map(|(fault, _)| *fault).collect::<Vec<_>>(),
            [false, false, true, true]
        );
        assert!(lines(&told)[3].1.ends_with("Xid 79"));
    }

    #[test]
    fn a_gpu_is_followed_until_nobody_listens() {
        /// A GPU with one error after the other, and a memory error between them.
        struct FailingGpu(Mutex<(u64, Vec<u64>)>);
        impl Driver for FailingGpu {
            fn health(&self, _: usize) -> GpuHealth {
                gpu(self.0.lock().expect("it does not panic").0)
            }
            fn critical_error(&self, _: usize, _: Duration) -> Option<u64> {
                let mut state = self.0.lock().expect("it does not panic");
                state.0 += 1;
                state.1.pop()
            }
        }
        let (send, heard) = mpsc::channel();
        follow(Arc::new(FailingGpu(Mutex::new((0, vec![31, 94])))), 3, move |reports| {
            reports.into_iter().all(|report| send.send(report).is_ok())
        });
        let told: Vec<_> = heard.iter().take(3).collect();
        let lines = lines(&told);
        assert!(lines[0].1.ends_with("Xid 94") && lines[1].1.contains("Xid 31"), "{lines:?}");
        assert_eq!(lines[2], (true, "GPU 3: new uncorrectable memory errors while this worker runs: 10"));
    }
}
