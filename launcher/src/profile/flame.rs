//! The flame graph: spans as bars, each below the one it lies in and as wide as its time.
//!
//! Drawn here: the usual crate for it brings scripts, which this picture has no need of, and a licence of
//! other terms. A bar's name, time and memory are shown by the browser where the pointer rests.

use std::fmt::Write;

use coxswain_nn::profile::{SpanKind, SpanSum};
use coxswain_proto::human;

use super::Profile;

/// The picture's width in pixels.
const WIDTH: f64 = 1200.0;
/// A bar's height, with the line between it and the next.
const ROW: f64 = 18.0;
/// Above the bars: the title.
const TOP: f64 = 28.0;
/// Width of a letter.
const LETTER: f64 = 6.7;
/// Letters of a name that is cut: fewer tell nothing.
const SHORTEST: usize = 5;
/// Bars that are narrower are left out.
const NARROWEST: f64 = 0.4;

const STYLE: &str = "<style>
text { font: 11px ui-monospace, 'DejaVu Sans Mono', monospace; fill: #1c2330; }
text.title { font: 14px system-ui, 'DejaVu Sans', sans-serif; }
rect { stroke: #ffffff; stroke-width: 0.6; }
rect:hover { stroke: #1c2330; }
.all { fill: #d5dbe2; } .phase { fill: #a9c9ea; } .stage { fill: #9ed3ae; } .layer { fill: #f3dc8f; }
.part { fill: #d9bdf0; } .operation { fill: #f5b183; }
@media (prefers-color-scheme: dark) {
  svg { background: #0f141b; } text.title { fill: #e3e8ef; } rect { stroke: #0f141b; } rect:hover { stroke: #fff; }
}
</style>
";

/// The picture, which needs nothing else and runs no script. `title` is a text from anywhere.
pub fn flame_graph(profile: &Profile, title: &str) -> String {
    let height = TOP + ROW * depth(&profile.all) as f64 + 6.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">\n{STYLE}"
    );
    let told = format!("{title}: {:.1} ms a step", profile.ms(profile.all.time));
    let _ = writeln!(svg, "<text class=\"title\" x=\"4\" y=\"18\">{}</text>", escaped(&told));
    bars(&mut svg, profile, &profile.all, [0.0, TOP]);
    svg.push_str("</svg>\n");
    svg
}

/// A span's bar, and below it those that lie in it.
fn bars(svg: &mut String, profile: &Profile, span: &SpanSum, [x, y]: [f64; 2]) {
    let width = WIDTH * profile.share(span.time) / 100.0;
    if width < NARROWEST {
        return;
    }
    let (class, name) = named(span);
    let _ = write!(
        svg,
        "<g><rect class=\"{class}\" x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\"/>",
        ROW - 1.0
    );
    let calls = span.count as f64 / profile.steps.count as f64;
    let _ = write!(
        svg,
        "<title>{name}: {:.2} ms a step, {:.1} %, {} times; at most {} in use</title>",
        profile.ms(span.time),
        profile.share(span.time),
        human::count(calls),
        human::bytes(span.peak)
    );
    if let Some(label) = label(span, name, ((width - 6.0).max(0.0) / LETTER) as usize) {
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{label}</text>", x + 3.0, y + 12.5);
    }
    svg.push_str("</g>\n");
    let mut x = x;
    for inner in &span.inner {
        bars(svg, profile, inner, [x, y + ROW]);
        x += WIDTH * profile.share(inner.time) / 100.0;
    }
}

/// As much of a name as so many letters hold, of a layer at least its number.
fn label(span: &SpanSum, name: String, letters: usize) -> Option<String> {
    if name.chars().count() <= letters {
        return Some(name);
    }
    match span.kind {
        SpanKind::Layer(number) => Some(number.to_string()).filter(|number| number.len() <= letters),
        _ if letters >= SHORTEST => Some(name.chars().take(letters - 1).chain(['…']).collect()),
        _ => None,
    }
}

/// A span's class in the style sheet, and its name.
fn named(span: &SpanSum) -> (&'static str, String) {
    match span.kind {
        SpanKind::All => ("all", "a step".to_owned()),
        SpanKind::Phase => ("phase", span.name.to_owned()),
        SpanKind::Stage if span.name.is_empty() => ("stage", "between".to_owned()),
        SpanKind::Stage => ("stage", span.name.to_owned()),
        SpanKind::Layer(number) => ("layer", format!("{} {number}", span.name)),
        SpanKind::Part => ("part", span.name.to_owned()),
        SpanKind::Operation => ("operation", span.name.to_owned()),
    }
}

fn depth(span: &SpanSum) -> usize {
    1 + span.inner.iter().map(depth).max().unwrap_or(0)
}

fn escaped(text: &str) -> String {
    human::escaped(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::profile::{tables, taken::ProfiledSteps};

    fn span(kind: SpanKind, name: &'static str, ms: u64, inner: Vec<SpanSum>) -> SpanSum {
        SpanSum { kind, name, count: 2, time: Duration::from_millis(ms), peak: 3 << 20, inner }
    }

    fn profile() -> Profile {
        let linear = |ms| span(SpanKind::Operation, "linear", ms, Vec::new());
        let again = span(SpanKind::Part, "recompute", 10, vec![linear(8)]);
        let layers = vec![
            span(SpanKind::Layer(0), "layer", 20, vec![linear(12), again]),
            span(SpanKind::Layer(1), "layer", 40, vec![linear(30)]),
        ];
        let stage = span(SpanKind::Stage, "language", 70, layers);
        let all = span(
            SpanKind::All,
            "all",
            100,
            vec![
                span(SpanKind::Phase, "data", 5, Vec::new()),
                span(SpanKind::Phase, "backward", 80, vec![stage]),
            ],
        );
        Profile { steps: ProfiledSteps { count: 2, samples: 16, threads: 2 }, all }
    }

    #[test]
    fn bars_lie_within_the_one_above_and_foreign_texts_run_nowhere() {
        let svg = flame_graph(&profile(), "<script>alert(1)</script>");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("<script"));
        assert!(svg.contains("x=\"60.0\" y=\"46\" width=\"960.0\""), "backward, behind data: {svg}");
        assert!(svg.contains("layer 1: 20.00 ms a step, 40.0 %, 1.0 times; at most 3.0 MiB in use"), "{svg}");
        assert_eq!(svg.matches("<rect class").count(), 10);
    }

    #[test]
    fn a_narrow_bar_has_what_tells_something_of_its_name() {
        let shown = |kind, name, letters| {
            let span = span(kind, name, 1, Vec::new());
            label(&span, named(&span).1, letters)
        };
        assert_eq!(shown(SpanKind::Layer(12), "layer", 8).as_deref(), Some("layer 12"));
        assert_eq!(shown(SpanKind::Layer(12), "layer", 7).as_deref(), Some("12"));
        assert_eq!(shown(SpanKind::Layer(12), "layer", 1), None);
        assert_eq!(shown(SpanKind::Part, "recompute", 5).as_deref(), Some("reco…"));
        assert_eq!(shown(SpanKind::Part, "recompute", 4), None);
    }

    #[test]
    fn tables_tell_stages_with_their_layers_and_operations_with_what_is_between_them() {
        let text = tables(&profile());
        for line in [
            "2 steps after 1 warm-up step, 16 samples each, on the CPU in one process, threads: 2",
            "language, 2 layers of 10.0 to 20.0 ms",
            "linear",
            "waiting for data",
            "all else",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        let row = |name: &str| {
            let row = text.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_default();
            row.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("of this recompute")[3..], ["5.00", "10.0", "%"]);
        assert_eq!(row("linear")[1..], ["25.0", "50.0", "%", "3"]);
        assert_eq!(row("all else")[2..], ["22.5", "45.0", "%"]);
        assert_eq!(row("a step")[2..], ["50.0", "100.0", "%", "3.0", "MiB"]);
    }
}
