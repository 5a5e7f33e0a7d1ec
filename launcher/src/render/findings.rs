//! What `cox data check` found, as text.

use coxswain_proto::human;
use coxswain_survey::{Finding, Report, SampleReport, Severity};

use super::table;

/// A row for each finding in a LeRobot data set, and how many there are.
pub fn text(report: &Report) -> String {
    let head = ["", "kind", "file", "episode", "frame"];
    let number = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let row = |finding: &Finding| {
        let [severity, kind, file] = beginning(finding);
        [severity, kind, file, number(finding.episode), number(finding.frame)]
    };
    listed(head, &report.findings, row, report.left_out)
        + &format!(
            "{}: {}, {} · {}, {}, {}; {} of {} pictures decoded",
            report.path.display(),
            count(report.count(Severity::Error) as u64, "error"),
            count(report.count(Severity::Warning) as u64, "warning"),
            count(report.episodes, "episode"),
            count(report.frames, "frame"),
            count(report.files, "file"),
            human::grouped(report.decoded),
            human::grouped(report.pictures),
        )
}

/// A row for each finding in the samples of a run, what was read, and how many there are.
pub fn of_samples(report: &SampleReport) -> String {
    let row = |finding: &Finding| {
        let [severity, kind, file] = beginning(finding);
        [severity, kind, file, finding.row.map_or_else(|| "-".to_owned(), |row| row.to_string())]
    };
    let mut text = listed(["", "kind", "file", "row"], &report.findings, row, report.left_out);
    report.about.iter().for_each(|about| text += &format!("{about}\n"));
    text + &format!(
        "{}: {}, {} · {} of {} read",
        report.path.display(),
        count(report.count(Severity::Error) as u64, "error"),
        count(report.count(Severity::Warning) as u64, "warning"),
        human::grouped(report.read),
        count(report.samples, "sample"),
    )
}

/// The table; nothing if nothing was found.
fn listed<const N: usize>(
    head: [&str; N],
    findings: &[Finding],
    row: impl Fn(&Finding) -> [String; N],
    left_out: u64,
) -> String {
    let rows: Vec<_> = findings.iter().map(row).collect();
    let remarks: Vec<_> = findings.iter().map(remark).collect();
    let mut text = String::new();
    if !rows.is_empty() {
        text = table::remarked(head, &rows, &remarks, table::width()) + "\n\n";
    }
    if left_out > 0 {
        text += &format!("and {} more findings\n", human::grouped(left_out));
    }
    text
}

fn count(count: u64, one: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        many => format!("{} {one}s", human::grouped(many)),
    }
}

fn beginning(finding: &Finding) -> [String; 3] {
    let severity = match finding.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    let file = if finding.file.is_empty() { "-".to_owned() } else { finding.file.clone() };
    [severity.to_owned(), finding.kind.to_owned(), file]
}

fn remark(finding: &Finding) -> String {
    let Finding { feature, found, remedy, more, .. } = finding;
    let feature = if feature.is_empty() { String::new() } else { format!("{feature}: ") };
    let remedy = if remedy.is_empty() { String::new() } else { format!("; {remedy}") };
    let more = match more {
        0 => String::new(),
        more => format!(" (and {} more like it)", human::grouped(*more)),
    };
    format!("{feature}{found}{more}{remedy}")
}
