//! What `cox data check` found, as text.

use coxswain_proto::human;
use coxswain_survey::{Finding, Report, Severity};

use super::table;

/// A row for each finding, and how many there are.
pub fn text(report: &Report) -> String {
    let rows: Vec<_> = report.findings.iter().map(row).collect();
    let remarks: Vec<_> = report.findings.iter().map(remark).collect();
    let mut text = String::new();
    if !rows.is_empty() {
        let head = ["", "kind", "file", "episode", "frame"];
        text = table::remarked(head, &rows, &remarks, table::width()) + "\n\n";
    }
    if report.left_out > 0 {
        text += &format!("and {} more findings\n", human::grouped(report.left_out));
    }
    let count = |count: u64, one: &str| match count {
        1 => format!("1 {one}"),
        many => format!("{} {one}s", human::grouped(many)),
    };
    text + &format!(
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

fn row(finding: &Finding) -> [String; 5] {
    let severity = match finding.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    let number = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let file = if finding.file.is_empty() { "-".to_owned() } else { finding.file.clone() };
    [severity.to_owned(), finding.kind.to_owned(), file, number(finding.episode), number(finding.frame)]
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
