//! The memory table of a run, on lines of at most 62 columns: with the clock and the tag in front they fit a
//! terminal of 80.
//!
//! ```text
//! rank  host            in use  phase        reserved     driver
//!    0  node-a          20 MiB  forward        40 MiB     60 MiB      a line for each rank, at most `limit`
//!                                                                     of them
//!
//! phase           in use  rank    reserved     driver
//! forward         20 MiB     0      40 MiB     60 MiB                 the rank with most, by phase
//! ```
//!
//! What is predicted beside it is laid out by [`Comparison`](coxswain_proto::memory::Comparison), for the
//! rank that holds most. `cox memory` shows the same without a clock, so its ranks have two columns more.

use std::collections::BTreeMap;

use coxswain_proto::{human, ids::Bytes};

use crate::core::{
    memory::RankMemory,
    report::{PhaseMemory, WorkerPhase},
};

/// The ranks with the largest peaks, at most `limit`, in rank order.
pub fn largest(table: &[RankMemory], limit: usize) -> Vec<&RankMemory> {
    let mut rows: Vec<_> = table.iter().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.peak().map(|peak| peak.in_use)));
    rows.truncate(limit);
    rows.sort_by_key(|row| row.slot);
    rows
}

/// Heading of the ranks.
pub fn rank_head() -> String {
    format!(
        "{:>4}  {:<12}{:>10}  {:<10}{:>11}{:>11}",
        "rank", "host", "in use", "phase", "reserved", "driver"
    )
}

/// One rank: the largest of its peaks, scope by scope.
pub fn rank(row: &RankMemory) -> String {
    let most = |scope: fn(&PhaseMemory) -> Bytes| {
        row.phases.iter().map(scope).max().map_or_else(|| "-".to_owned(), |bytes| human::bytes(bytes.0))
    };
    format!(
        "{:>4}  {:<12.12}{:>10}  {:<10}{:>11}{:>11}",
        row.slot,
        row.host,
        most(|peak| peak.in_use),
        row.peak().map_or("-", |peak| short(peak.phase)),
        most(|peak| peak.reserved),
        most(|peak| peak.driver)
    )
}

/// A heading, and for each phase that some rank has reported the rank with most in use.
pub fn phases(table: &[RankMemory]) -> Vec<String> {
    let mut most = BTreeMap::<WorkerPhase, (&RankMemory, &PhaseMemory)>::new();
    for (row, peak) in table.iter().flat_map(|row| row.phases.iter().map(move |peak| (row, peak))) {
        let kept = most.entry(peak.phase).or_insert((row, peak));
        if peak.in_use > kept.1.in_use {
            *kept = (row, peak);
        }
    }
    let head = format!("{:<12}{:>11}  {:>4}{:>12}{:>11}", "phase", "in use", "rank", "reserved", "driver");
    let line = |(phase, (row, peak)): (&WorkerPhase, &(&RankMemory, &PhaseMemory))| {
        let [in_use, reserved, driver] =
            [peak.in_use, peak.reserved, peak.driver].map(|bytes| human::bytes(bytes.0));
        format!("{:<12}{in_use:>11}  {:>4}{reserved:>12}{driver:>11}", short(*phase), row.slot)
    };
    [head].into_iter().chain(most.iter().map(line)).collect()
}

/// Predicted beside measured, for the rank that holds most of those that compare.
pub fn prediction(table: &[RankMemory]) -> Vec<String> {
    let compared = table.iter().filter_map(|row| Some((row, row.comparison.as_ref()?)));
    let Some((row, comparison)) = compared.max_by_key(|(_, comparison)| comparison.measured) else {
        return Vec::new();
    };
    comparison.table_of(row.slot.0)
}

/// The tables in 80 columns: each rank with its prediction, each phase, and the fullest rank's categories if
/// there are any.
pub fn tables(table: &[RankMemory]) -> String {
    let row = |row: &RankMemory| {
        let (predicted, error) = match &row.comparison {
            Some(of) => (human::bytes(of.predicted), of.error()),
            None => ("-".to_owned(), None),
        };
        let error = error.map_or_else(|| "-".to_owned(), |error| format!("{:+.1} %", 100.0 * error));
        format!("{}{predicted:>10}{error:>8}", rank(row))
    };
    let head = format!("{}{:>10}{:>8}", rank_head(), "predicted", "error");
    let ranks: Vec<_> = [head].into_iter().chain(table.iter().map(row)).collect();
    let parts = [ranks, phases(table), prediction(table)];
    let parts: Vec<_> =
        parts.iter().filter(|lines| !lines.is_empty()).map(|lines| lines.join("\n")).collect();
    parts.join("\n\n")
}

fn short(phase: WorkerPhase) -> &'static str {
    if phase == WorkerPhase::Communication { "comm" } else { phase.noun() }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::{
        ids::Slot,
        memory::{Category, Comparison, MemoryRow},
    };

    use super::*;

    fn peak(phase: WorkerPhase, mib: u64) -> PhaseMemory {
        let scope = |times: u64| Bytes((times * mib) << 20);
        PhaseMemory { phase, in_use: scope(1), reserved: scope(2), driver: scope(3) }
    }

    fn row(slot: u32, host: &str, phases: Vec<PhaseMemory>) -> RankMemory {
        RankMemory { slot: Slot(slot), host: host.into(), phases, comparison: None }
    }

    #[test]
    fn ranks_and_phases_have_a_line_each_that_fits_beside_the_clock() {
        let table = [
            row(0, "node-a", vec![peak(WorkerPhase::Loading, 10), peak(WorkerPhase::Forward, 20)]),
            row(1, "a-host-of-a-long-name", vec![peak(WorkerPhase::Loading, 11)]),
        ];
        let lines: Vec<_> = [rank_head()]
            .into_iter()
            .chain(largest(&table, 64).into_iter().map(rank))
            .chain(phases(&table))
            .collect();
        assert_eq!(
            lines,
            [
                "rank  host            in use  phase        reserved     driver",
                "   0  node-a        20.0 MiB  forward      40.0 MiB   60.0 MiB",
                "   1  a-host-of-a-  11.0 MiB  load         22.0 MiB   33.0 MiB",
                "phase            in use  rank    reserved     driver",
                "load           11.0 MiB     1    22.0 MiB   33.0 MiB",
                "forward        20.0 MiB     0    40.0 MiB   60.0 MiB",
            ]
        );
        assert!(lines.iter().all(|line| line.chars().count() <= 62));
    }

    #[test]
    fn the_fullest_rank_is_laid_beside_its_prediction() {
        let mut table = [row(0, "a", vec![]), row(1, "b", vec![]), row(2, "c", vec![])];
        assert_eq!(prediction(&table), Vec::<String>::new());
        let of = MemoryRow { category: Category::Trainables, predicted: 1 << 20, measured: Some(1 << 20) };
        for (row, measured) in table[..2].iter_mut().zip([5 << 20, 10 << 20]) {
            row.comparison = Some(Comparison { predicted: 9 << 20, measured, runs: 0, categories: vec![of] });
        }
        assert_eq!(
            prediction(&table),
            [
                "rank 1                        predicted    measured     error",
                "trainables                      1.0 MiB     1.0 MiB    +0.0 %",
                "peak, from sizes alone          9.0 MiB    10.0 MiB   -10.0 %",
            ]
        );
    }

    #[test]
    fn without_a_clock_each_rank_is_beside_its_prediction_in_eighty_columns() {
        let mut large = peak(WorkerPhase::Communication, 10);
        (large.reserved, large.driver) = (Bytes(1000 << 30), Bytes(1000 << 30));
        let mut table = [row(0, "a-host-of-a-long-name", vec![large]), row(1, "b", vec![])];
        let of = MemoryRow { category: Category::Trainables, predicted: 1 << 20, measured: Some(1 << 20) };
        table[0].comparison =
            Some(Comparison { predicted: 9 << 20, measured: 10 << 20, runs: 0, categories: vec![of] });
        let shown = tables(&table);
        let lines: Vec<_> = shown.lines().collect();
        assert_eq!(
            lines[..6],
            [
                "rank  host            in use  phase        reserved     driver predicted   error",
                "   0  a-host-of-a-  10.0 MiB  comm       1000.0 GiB 1000.0 GiB   9.0 MiB -10.0 %",
                "   1  b                    -  -                   -          -         -       -",
                "",
                "phase            in use  rank    reserved     driver",
                "comm           10.0 MiB     0  1000.0 GiB 1000.0 GiB",
            ]
        );
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{shown}");
        assert!(lines[7].starts_with("rank 0 ") && lines[8].starts_with("trainables"), "{shown}");
    }

    #[test]
    fn a_crowd_is_cut_to_the_largest_peaks() {
        let table =
            [(0, 5), (1, 9), (2, 7)].map(|(rank, mib)| row(rank, "", vec![peak(WorkerPhase::Forward, mib)]));
        let kept: Vec<_> = largest(&table, 2).iter().map(|row| row.slot).collect();
        assert_eq!(kept, [Slot(1), Slot(2)]);
    }
}
