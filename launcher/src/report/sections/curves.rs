//! Loss, rates, speed, and where a step's time went.

use super::figure::{charts, figure, section};
use crate::report::{
    chart::{COLOURS, Chart, PlotCurve, Unit, means},
    html::Html,
    read::ReportedRun,
};

/// Columns of a smoothed curve.
const SMOOTH: usize = 80;
/// Columns of areas.
const AREAS: usize = 80;
/// Parts of a step that take less of it are left out.
const LEAST_PART: f64 = 0.005;
/// Names of the engine's parts of a step, in the order of a step; a task's stages stand behind the first.
const PARTS: [&str; 3] = ["data", "optimizer", "communication"];

/// Training loss, held-out measures, learning rates and norms of gradients, over the steps.
pub(super) fn loss(run: &ReportedRun) -> Option<Html> {
    let losses = run.losses();
    let smooth = means(&losses, SMOOTH);
    let names: &[_] = if losses.len() > SMOOTH { &[(0, "mean")] } else { &[] };
    let curves = vec![
        PlotCurve { points: losses, faint: names.len() == 1, ..PlotCurve::default() },
        PlotCurve { points: if names.is_empty() { Vec::new() } else { smooth }, ..PlotCurve::default() },
    ];
    let mut figures =
        vec![figure("Training loss", names, Chart { curves, x: Unit::Steps, ..Chart::default() })];
    // Parts of measures have a section of their own.
    let measures = run.tags("eval/").into_iter().filter(|(_, name)| !name.contains('/'));
    figures.extend(measures.map(|(_, name)| held_out(run, &name)));
    figures.push(together(run, "Learning rate", "lr/"));
    figures.push(together(run, "Norm of the gradient", "grad_norm/"));
    section("Learning", charts(figures))
}

/// A measure over the steps at which it was taken, with that of the weights' average where there is one.
fn held_out(run: &ReportedRun, name: &str) -> Html {
    let averaged = run.series(&format!("eval/ema/{name}"));
    let names: &[_] = if averaged.is_empty() { &[] } else { &[(1, "weights"), (2, "their average")] };
    let curves = [run.held_out(name), averaged].into_iter().zip(1..);
    let curves =
        curves.map(|(points, colour)| PlotCurve { colour, points, marked: true, ..PlotCurve::default() });
    let chart = Chart { curves: curves.collect(), x: Unit::Steps, ..Chart::default() };
    figure(&format!("Held-out {}", name.replace('_', " ")), names, chart)
}

/// All tags of a kind in one chart.
fn together(run: &ReportedRun, title: &str, prefix: &str) -> Html {
    let tags = run.tags(prefix);
    let names: Vec<_> = tags.iter().enumerate().map(|(colour, (_, name))| (colour, name.as_str())).collect();
    let curves = tags.iter().enumerate().take(COLOURS);
    let curves = curves.map(|(colour, (tag, _))| PlotCurve {
        colour,
        points: run.series(tag),
        ..PlotCurve::default()
    });
    let chart = Chart { curves: curves.collect(), x: Unit::Steps, ..Chart::default() };
    let names = if names.len() > 1 { &names[..names.len().min(COLOURS)] } else { &[] };
    figure(title, names, chart)
}

/// Samples a second, and a step's parts on one another.
pub(super) fn speed(run: &ReportedRun) -> Option<Html> {
    let samples = run.series("speed/samples_per_second");
    let names: &[_] = if samples.len() > SMOOTH { &[(2, "mean")] } else { &[] };
    let smooth = if names.is_empty() { Vec::new() } else { means(&samples, SMOOTH) };
    let curves = vec![
        PlotCurve { colour: 2, points: samples, faint: names.len() == 1, ..PlotCurve::default() },
        PlotCurve { colour: 2, points: smooth, ..PlotCurve::default() },
    ];
    let chart = Chart { curves, x: Unit::Steps, from_zero: true, ..Chart::default() };
    section("Speed", charts([figure("Samples a second", names, chart), split(run)]))
}

fn split(run: &ReportedRun) -> Html {
    let stages = run.tags("seconds/").into_iter().map(|(_, name)| name);
    let stages = stages.filter(|name| name != "step" && !PARTS.contains(&name.as_str()));
    let mut parts: Vec<String> = stages.collect();
    parts.insert(0, PARTS[0].to_owned());
    parts.extend(PARTS[1..].iter().map(|&name| name.to_owned()));
    let whole = run.series("seconds/step");
    let curve = |name: &String| {
        let points = means(&aligned(&whole, &run.series(&format!("seconds/{name}"))), AREAS);
        (name.clone(), points)
    };
    let mean = |points: &[(f64, f64)]| {
        points.iter().map(|(_, seconds)| seconds).sum::<f64>() / points.len().max(1) as f64
    };
    let total = mean(&whole).max(f64::MIN_POSITIVE);
    let told = parts.iter().map(curve).filter(|(_, points)| mean(points) >= LEAST_PART * total);
    let told: Vec<_> = told.collect();
    let name = |(name, points): &(String, Vec<(f64, f64)>)| {
        format!("{} {:.0} %", name.replace('_', " "), 100.0 * mean(points) / total)
    };
    let names: Vec<_> = told.iter().map(name).collect();
    let names: Vec<_> = names.iter().enumerate().map(|(colour, name)| (colour, name.as_str())).collect();
    let curves = told.into_iter().enumerate();
    let curves =
        curves.map(|(colour, (_, points))| PlotCurve { colour, points, ..PlotCurve::default() }).collect();
    let chart = Chart { curves, x: Unit::Steps, y: Unit::Seconds, stacked: true, ..Chart::default() };
    figure("Time of a step, mean over ranks", &names, chart)
}

/// The values of a part at the steps of the whole; 0 where it has none.
fn aligned(whole: &[(f64, f64)], part: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut part = part.iter().peekable();
    let value = |&(step, _): &(f64, f64)| {
        while part.next_if(|(at, _)| *at < step).is_some() {}
        (step, part.next_if(|(at, _)| *at == step).map_or(0.0, |(_, value)| *value))
    };
    whole.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_laid_beside_the_whole_step_by_step() {
        let whole = [(1.0, 5.0), (2.0, 5.0), (4.0, 5.0)];
        assert_eq!(
            aligned(&whole, &[(2.0, 1.0), (3.0, 9.0), (4.0, 2.0)]),
            [(1.0, 0.0), (2.0, 1.0), (4.0, 2.0)]
        );
        assert_eq!(aligned(&[], &[(1.0, 1.0)]), []);
    }
}
