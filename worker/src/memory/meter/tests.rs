//! Peaks go to the phase that raised them, and what goes over to whom it concerns.

use super::*;

#[test]
fn resident_peaks_are_booked_to_the_phase_that_raised_them() {
    let mut meter = Meter::new(Phase::Loading, None);
    meter.enter(Phase::Forward).expect("no capacity, no bound");
    let mut held = vec![0u8; 96 << 20];
    held.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    meter.enter(Phase::Backward).expect("no capacity, no bound");
    drop(std::hint::black_box(held));
    let peaks = meter.report();
    let driver = |phase| peaks.iter().find(|p| p.phase == phase).expect("phase was entered").driver.0;
    assert!(driver(Phase::Forward) >= driver(Phase::Loading) + (64 << 20), "{peaks:?}");
}

fn attempt(cells: usize, divisible: bool) -> Attempt {
    Attempt { rank: Rank(0), step: Step(0), samples: 1, cells, divisible, representative: true }
}

#[test]
fn a_micro_batch_that_will_not_fit_is_refused_before_it_runs_unless_it_cannot_be_smaller() {
    let mut meter = Meter::new(Phase::Data, Some(Bytes(1 << 40)));
    meter.demand.observe(1, 1 << 30);
    assert_eq!(meter.expect(attempt(100, true)), Ok(()));
    let refused = meter.expect(attempt(2000, true)).expect_err("2000 GiB do not fit in 1024");
    assert!(refused.predicted && refused.to_string().contains("it needs about"), "{refused}");
    assert_eq!(meter.expect(attempt(2000, false)), Ok(()));
    ceiling::set(None);
}

#[test]
fn a_micro_batch_that_was_given_up_teaches_nothing() {
    let mut meter = Meter::new(Phase::Data, Some(Bytes(1 << 40)));
    meter.demand.observe(1, 1 << 30);
    meter.expect(attempt(100, true)).expect("100 GiB fit in 1024");
    meter.given_up().expect("it stayed below");
    assert_eq!((meter.demand.predict(2), meter.last_took()), (Some(2 << 30), 0));
    ceiling::set(None);
}

/// Holds more whenever it is read.
#[derive(Debug, Default)]
struct GrowingMeter(std::sync::atomic::AtomicU64);

impl Gauge for GrowingMeter {
    fn read(&self) -> PhasePeak {
        let in_use = self.0.fetch_add(1 << 30, std::sync::atomic::Ordering::Relaxed);
        PhasePeak { in_use, reserved: 2 * in_use, driver: 3 * in_use }
    }
}

#[test]
fn what_moving_state_takes_is_no_micro_batchs_fault() {
    let gauge = || Box::new(GrowingMeter(std::sync::atomic::AtomicU64::new(8 << 30)));
    for (moves, phase) in [(true, Phase::Connecting), (true, Phase::Joining), (false, Phase::Optimizer)] {
        let mut meter = Meter::new(phase, Some(Bytes(4 << 30))).on_gpu(gauge());
        meter.enter(Phase::Data).expect("only loading is refused at once");
        assert_eq!(meter.take_overrun().is_none(), moves, "{phase:?}");
    }
}

#[test]
fn on_a_gpu_the_gpus_own_figures_count() {
    let mut meter =
        Meter::new(Phase::Loading, Some(Bytes(4 << 30))).on_gpu(Box::new(GrowingMeter::default()));
    meter.enter(Phase::Forward).expect("loading stayed below 4 GiB");
    meter.enter(Phase::Backward).expect("a step says so when it votes");
    meter.enter(Phase::Optimizer).expect("a step says so when it votes");
    let peaks = meter.report();
    let forward = peaks.iter().find(|peak| peak.phase == Phase::Forward).expect("entered");
    assert_eq!(forward.reserved.0, 2 * forward.in_use.0);
    assert_eq!(forward.driver.0, 3 * forward.in_use.0);
    assert!(forward.in_use.0 >= 1 << 30 && peaks.iter().all(|peak| peak.in_use.0 < 1 << 40), "{peaks:?}");
    let found = meter.take_overrun().expect("backward went over 4 GiB");
    assert_eq!((found.phase, found.capacity), (Phase::Backward, Some(Bytes(4 << 30))));
}

/// Holds what the test says.
#[derive(Clone, Debug, Default)]
struct ScriptedMeter(std::sync::Arc<std::sync::atomic::AtomicU64>);

impl Gauge for ScriptedMeter {
    fn read(&self) -> PhasePeak {
        let in_use = self.0.load(std::sync::atomic::Ordering::Relaxed);
        PhasePeak { in_use, reserved: in_use, driver: in_use }
    }
}

#[test]
fn what_is_overlooked_is_booked_and_counts_against_no_micro_batch() {
    let told = ScriptedMeter::default();
    let mut meter = Meter::new(Phase::Data, Some(Bytes(100))).on_gpu(Box::new(told.clone()));
    let mut over = |overlooked: bool| {
        let set = |bytes| told.0.store(bytes, std::sync::atomic::Ordering::Relaxed);
        meter.enter(Phase::Communication).expect("told later");
        set(150);
        if overlooked {
            meter.overlook();
            set(50);
        }
        meter.enter(Phase::Data).expect("told later");
        set(50);
        (meter.take_overrun().map(|found| found.phase), meter.report())
    };
    let (found, _) = over(false);
    assert_eq!(found, Some(Phase::Communication));
    let (found, booked) = over(true);
    assert_eq!(found, None);
    let peak = booked.iter().find(|peak| peak.phase == Phase::Communication).expect("entered");
    assert_eq!(peak.in_use, Bytes(150));
}

#[test]
fn peaks_that_begin_anew_take_nothing_from_those_of_the_run_and_the_step() {
    let told = ScriptedMeter::default();
    let set = |bytes| told.0.store(bytes, std::sync::atomic::Ordering::Relaxed);
    let mut meter = Meter::new(Phase::Data, None).on_gpu(Box::new(told.clone()));
    let of = |peaks: Vec<PhaseMemory>, phase| {
        peaks.iter().find(|peak| peak.phase == phase).map(|peak| peak.in_use.0)
    };
    set(100);
    meter.enter(Phase::Forward).expect("no bound");
    set(300);
    meter.enter(Phase::Backward).expect("no bound");
    set(40);
    assert_eq!(of(meter.report_recent(), Phase::Forward), Some(300));
    meter.forget_recent();
    assert_eq!(of(meter.report_recent(), Phase::Forward), Some(0));
    assert_eq!(of(meter.report_recent(), Phase::Backward), Some(40), "the phase that runs goes on");
    set(20);
    meter.enter(Phase::Forward).expect("no bound");
    assert_eq!(of(meter.report_recent(), Phase::Forward), Some(20));
    assert_eq!(of(meter.report(), Phase::Forward), Some(300));
    assert_eq!(meter.take_step_peak(), Bytes(300));
}

/// Holds nothing at the ends of phases, and within them as much as it was told, while it is watched.
#[derive(Clone, Debug, Default)]
struct PhaseMeter(std::sync::Arc<[std::sync::atomic::AtomicU64; 2]>);

impl PhaseMeter {
    fn pass(&self, most: u64) {
        let [watched, seen] = &*self.0;
        seen.fetch_max(
            most * watched.load(std::sync::atomic::Ordering::Relaxed),
            std::sync::atomic::Ordering::Relaxed,
        );
    }
}

impl Gauge for PhaseMeter {
    fn read(&self) -> PhasePeak {
        PhasePeak::default()
    }

    fn watch(&self, on: bool) {
        self.0[0].store(on.into(), std::sync::atomic::Ordering::Relaxed);
    }

    fn take_most(&self) -> u64 {
        self.0[1].swap(0, std::sync::atomic::Ordering::Relaxed)
    }
}

#[test]
fn peaks_within_a_gpus_passes_are_seen_in_the_first_in_larger_ones_and_now_and_then() {
    let gauge = PhaseMeter::default();
    let mut meter = Meter::new(Phase::Data, None).on_gpu(Box::new(gauge.clone()));
    let mut took = |cells, most| {
        meter.enter(Phase::Forward).expect("no bound");
        meter.expect(attempt(cells, true)).expect("no bound");
        gauge.pass(most);
        meter.enter(Phase::Backward).expect("no bound");
        meter.passed(0, None).expect("it fitted");
        gauge.pass(1 << 40);
        meter.last_took()
    };
    assert_eq!([took(10, 100), took(10, 110), took(9, 90)], [100, 110, 90]);
    assert_eq!([took(10, 100), took(11, 120), took(11, 120)], [0, 120, 0], "none is larger than all before");
    let later: Vec<u64> = (6..=64).map(|_| took(10, 130)).collect();
    assert_eq!(later.iter().sum::<u64>(), 130, "the 65th is watched, and nothing between passes");
    let peaks = meter.report();
    let forward = peaks.iter().find(|peak| peak.phase == Phase::Forward).expect("entered");
    assert_eq!(forward.in_use, Bytes(130));
}

#[test]
fn a_devices_refusal_is_told_in_its_own_words() {
    let mut meter = Meter::new(Phase::Forward, None);
    let overrun = Overrun { in_use: 5, device: Some("CUDA_ERROR_OUT_OF_MEMORY".into()) };
    let found = meter.passed(0, Some(overrun)).expect_err("it overran");
    assert!(found.to_string().contains("the device says: CUDA_ERROR_OUT_OF_MEMORY"), "{found}");
}
