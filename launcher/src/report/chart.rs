//! Charts as SVG: curves over steps or time, and areas laid on one another.
//!
//! Drawn by `plotters` at twice the size they have on the page, because it places points on whole pixels.
//! Colours stand in the drawing as those of a light page; the style sheet names them and has others for a
//! dark one. Legends are the page's, whose text can wrap.

use std::ops::Range;

use plotters::{
    coord::Shift,
    element::{PathElement, Polygon},
    prelude::{
        ChartBuilder, Color, DashedLineSeries, DrawingArea, DrawingAreaErrorKind, IntoDrawingArea, IntoFont,
        LineSeries, RGBColor, SVGBackend, ShapeStyle, TextStyle,
    },
};

/// Pixels of the drawing for one of the page.
const SCALE: u32 = 2;
/// Size on the page.
const SIZE: [u32; 2] = [480, 250];
/// Size of a chart in a row of many.
const SMALL: [u32; 2] = [200, 120];
/// Letters, in pixels of the page.
const FONT: u32 = 14;
/// Letters of a chart in a row of many.
const SMALL_FONT: u32 = 13;
/// Beyond this ratio of largest to smallest an axis is logarithmic.
const WIDE_RANGE: f64 = 200.0;
/// Above the largest value, as a part of the range: a curve on the frame's edge looks cut.
const HEADROOM: f64 = 0.05;

/// Pixels of a dash, of a curve that would hide another.
const DASH: u32 = 6;
/// Curves hide one another where their values differ by less than this part of them.
const ALIKE: f64 = 0.003;

/// Text and axes.
const INK: RGBColor = RGBColor(0x55, 0x60, 0x6e);
/// Lines of the mesh.
const GRID: RGBColor = RGBColor(0xe3, 0xe7, 0xec);
/// Faults.
const FAULT: RGBColor = RGBColor(0xd1, 0x24, 0x2f);
/// Curves and areas, in this order; the style sheet has the same as `.s0` to `.s7`.
const SERIES: [RGBColor; 8] = [
    RGBColor(0x1f, 0x6f, 0xb2),
    RGBColor(0xd9, 0x6b, 0x0b),
    RGBColor(0x2c, 0x8a, 0x4b),
    RGBColor(0x8a, 0x52, 0xb8),
    RGBColor(0xb5, 0x83, 0x00),
    RGBColor(0x13, 0x8a, 0x8a),
    RGBColor(0xc2, 0x3b, 0x7c),
    RGBColor(0x6b, 0x72, 0x80),
];
/// Colours that a legend has.
pub const COLOURS: usize = SERIES.len();

/// A chart's drawing.
pub struct Svg(pub(super) String);

/// One curve.
#[derive(Clone, Debug, Default)]
pub struct PlotCurve {
    /// Number of the colour in [`COLOURS`], modulo their number.
    pub colour: usize,
    /// In the order of x; what is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// A faint line below others.
    pub faint: bool,
    /// A point is marked where there are few of them.
    pub marked: bool,
}

impl PlotCurve {
    /// Whether a curve drawn later would cover this one, at every point that both have.
    fn hides_behind(&self, later: &Self) -> bool {
        let close = |(one, other): (&(f64, f64), &(f64, f64))| (one.1 - other.1).abs() <= ALIKE * one.1.abs();
        let both = || self.points.iter().zip(&later.points);
        both().next().is_some() && both().all(close) && self.colour != later.colour
    }
}

/// What the numbers at an axis are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// Plain numbers.
    #[default]
    Number,
    /// Steps of a run.
    Steps,
    /// Seconds.
    Seconds,
    /// Mebibytes.
    Mebibytes,
    /// Things, of which there are no halves.
    Things,
}

/// A chart to be drawn.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// Drawn in this order.
    pub curves: Vec<PlotCurve>,
    /// What x is.
    pub x: Unit,
    /// What y is.
    pub y: Unit,
    /// y begins with 0.
    pub from_zero: bool,
    /// x of faults, as lines from top to bottom.
    pub faults: Vec<f64>,
    /// Each curve is laid on the one before and filled; their x are the same.
    pub stacked: bool,
    /// One in a row of many.
    pub small: bool,
}

impl Chart {
    /// The drawing; nothing if there is no point.
    pub fn draw(self) -> Option<Svg> {
        let mut chart = self;
        for curve in &mut chart.curves {
            curve.points.retain(|(x, y)| x.is_finite() && y.is_finite());
        }
        if chart.stacked {
            chart.stack();
        }
        let (x, y) = chart.ranges()?;
        let is_plain = chart.from_zero || chart.stacked || chart.small;
        let is_log = !is_plain && y.start > 0.0 && y.end > WIDE_RANGE * y.start;
        let y = if is_log { y.start.log10()..y.end.log10() } else { y };
        if is_log {
            chart
                .curves
                .iter_mut()
                .flat_map(|curve| &mut curve.points)
                .for_each(|point| point.1 = point.1.log10());
        }
        let mut svg = String::new();
        let [width, height] = if chart.small { SMALL } else { SIZE };
        let area = SVGBackend::with_string(&mut svg, (width * SCALE, height * SCALE)).into_drawing_area();
        // A drawing into a text does not fail; if it did, the page would be without this one.
        chart.draw_on(&area, &Axes { x, y, is_log }).ok()?;
        area.present().ok()?;
        drop(area);
        Some(Svg(svg))
    }

    /// Adds to each curve those before it.
    fn stack(&mut self) {
        for upper in 1..self.curves.len() {
            let (below, above) = self.curves.split_at_mut(upper);
            let points = above[0].points.iter_mut().zip(&below[upper - 1].points);
            points.for_each(|(point, below)| point.1 += below.1);
        }
    }

    fn ranges(&self) -> Option<(Range<f64>, Range<f64>)> {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let over = |of: fn(&(f64, f64)) -> f64| {
            let least = points().map(of).fold(f64::INFINITY, f64::min);
            let most = points().map(of).fold(f64::NEG_INFINITY, f64::max);
            least..most
        };
        points().next()?;
        let (x, y) = (over(|point| point.0), over(|point| point.1));
        let y = widened(if self.from_zero || self.stacked { y.start.min(0.0)..y.end } else { y });
        let headroom = HEADROOM * (y.end - y.start);
        Some((widened(x), y.start..y.end + headroom))
    }

    fn draw_on(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, axes: &Axes) -> DrawResult {
        let font = |size: u32| TextStyle::from(("sans-serif", size * SCALE).into_font()).color(&INK);
        let (labels, margin) = if self.small { (3, 4) } else { (5, 8) };
        // Other units stand at their numbers.
        let below = if self.x == Unit::Steps { "step" } else { "" };
        let mut chart = ChartBuilder::on(area)
            .margin(margin * SCALE)
            .margin_right(3 * margin * SCALE)
            .x_label_area_size(if below.is_empty() { 18 } else { 34 } * SCALE)
            .y_label_area_size(if self.small { 38 } else { 52 } * SCALE)
            .build_cartesian_2d(axes.x.clone(), axes.y.clone())?;
        let of_x = |value: &f64| self.x.label(*value);
        let of_y = |value: &f64| if axes.is_log { logarithmic(*value) } else { self.y.label(*value) };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .bold_line_style(GRID.stroke_width(SCALE))
            .axis_style(GRID.stroke_width(SCALE))
            .label_style(font(if self.small { SMALL_FONT } else { FONT }))
            .x_labels(labels)
            .y_labels(labels)
            .x_desc(below)
            .axis_desc_style(font(FONT))
            .x_label_formatter(&of_x)
            .y_label_formatter(&of_y)
            .draw()?;
        let columns = area.dim_in_pixel().0 as usize / 2;
        let mut below: Vec<(f64, f64)> = vec![(axes.x.start, axes.y.start), (axes.x.end, axes.y.start)];
        for (at, curve) in self.curves.iter().enumerate() {
            let colour = SERIES[curve.colour % COLOURS];
            if self.stacked {
                let outline: Vec<_> = curve.points.iter().chain(below.iter().rev()).copied().collect();
                chart.draw_series([Polygon::new(outline, ShapeStyle::from(&colour.mix(0.75)).filled())])?;
                below.clone_from(&curve.points);
                continue;
            }
            let style = if curve.faint {
                colour.mix(0.35).stroke_width(SCALE)
            } else {
                colour.stroke_width(2 * SCALE - self.small as u32)
            };
            let points = extremes(&curve.points, &axes.x, columns);
            let few = curve.marked && points.len() <= 60 || points.len() == 1;
            if self.curves[..at].iter().any(|below| below.hides_behind(curve)) {
                chart.draw_series(DashedLineSeries::new(points, DASH * SCALE, DASH * SCALE, style))?;
                continue;
            }
            let series = LineSeries::new(points, style).point_size(if few { 3 * SCALE } else { 0 });
            chart.draw_series(series)?;
        }
        for &x in self.faults.iter().filter(|x| axes.x.contains(x)) {
            let line = vec![(x, axes.y.start), (x, axes.y.end)];
            chart.draw_series([PathElement::new(line, FAULT.mix(0.8).stroke_width(SCALE))])?;
        }
        Ok(())
    }
}

struct Axes {
    x: Range<f64>,
    y: Range<f64>,
    is_log: bool,
}

type DrawResult = Result<(), DrawingAreaErrorKind<std::io::Error>>;

impl Unit {
    fn label(self, value: f64) -> String {
        match self {
            Self::Number => number(value),
            Self::Steps => count(value),
            Self::Seconds => seconds(value),
            Self::Mebibytes => format!("{} MiB", number(value)),
            Self::Things => {
                if value.fract() == 0.0 {
                    number(value)
                } else {
                    String::new()
                }
            }
        }
    }
}

/// A number in as many digits as tell it from its neighbours at an axis.
pub fn number(value: f64) -> String {
    let shown = match value.abs() {
        0.0 => return "0".to_owned(),
        v if !(1e-3..1e5).contains(&v) => return format!("{value:.1e}").replace(".0e", "e"),
        v if v < 0.1 => format!("{value:.4}"),
        v if v < 10.0 => format!("{value:.3}"),
        v if v < 1000.0 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    };
    match shown.contains('.') {
        true => shown.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => shown,
    }
}

fn count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", number(v / 1e6)),
        v if v >= 1e4 => format!("{}k", number(v / 1e3)),
        v => number(v),
    }
}

fn seconds(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 1e-3 => format!("{} µs", number(1e6 * value)),
        v if v < 1.0 => format!("{} ms", number(1e3 * value)),
        v if v < 120.0 => format!("{} s", number(value)),
        v if v < 7200.0 => format!("{} min", number(value / 60.0)),
        _ => format!("{} h", number(value / 3600.0)),
    }
}

/// Powers of ten have a label.
fn logarithmic(exponent: f64) -> String {
    if exponent.fract() == 0.0 { number(10f64.powf(exponent)) } else { String::new() }
}

/// The range with room at its ends; one of a single value has room around that.
fn widened(range: Range<f64>) -> Range<f64> {
    let width = range.end - range.start;
    match width > 0.0 {
        true => range,
        false => {
            let room = if range.start == 0.0 { 1.0 } else { 0.1 * range.start.abs() };
            range.start - room..range.end + room
        }
    }
}

/// At most four points of each column that is a pixel wide: first, least, largest and last, so that the curve
/// covers what all of them would.
fn extremes(points: &[(f64, f64)], x: &Range<f64>, columns: usize) -> Vec<(f64, f64)> {
    let width = (x.end - x.start) / columns.max(1) as f64;
    let column = |point: &(f64, f64)| ((point.0 - x.start) / width) as usize;
    let mut kept = Vec::new();
    for column in points.chunk_by(|one, next| column(one) == column(next)) {
        if column.len() <= 4 {
            kept.extend_from_slice(column);
            continue;
        }
        let by_value =
            |(_, one): &(usize, &(f64, f64)), (_, other): &(usize, &(f64, f64))| one.1.total_cmp(&other.1);
        let least = column.iter().enumerate().min_by(by_value).map(|(at, _)| at);
        let most = column.iter().enumerate().max_by(by_value).map(|(at, _)| at);
        let mut places = [Some(0), least, most, Some(column.len() - 1)];
        places.sort_unstable();
        let mut places: Vec<_> = places.into_iter().flatten().collect();
        places.dedup();
        kept.extend(places.into_iter().map(|at| column[at]));
    }
    kept
}

/// Means over at most so many columns: what a curve is like below its noise.
pub fn means(points: &[(f64, f64)], columns: usize) -> Vec<(f64, f64)> {
    let finite: Vec<_> = points.iter().copied().filter(|(_, y)| y.is_finite()).collect();
    let size = finite.len().div_ceil(columns.max(1)).max(1);
    let mean = |points: &[(f64, f64)]| {
        let count = points.len() as f64;
        let sum = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / count, sum.1 / count)
    };
    finite.chunks(size).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: impl IntoIterator<Item = (f64, f64)>) -> PlotCurve {
        PlotCurve { points: points.into_iter().collect(), ..PlotCurve::default() }
    }

    fn drawn(chart: Chart) -> String {
        chart.draw().map(|svg| svg.0).unwrap_or_default()
    }

    #[test]
    fn a_long_curve_keeps_its_extremes_and_few_points() {
        let mut points: Vec<_> = (0..1_000_000).map(|step| (f64::from(step), 1.0)).collect();
        points[512_345].1 = 9.0;
        points[700_001].1 = -9.0;
        let kept = extremes(&points, &(0.0..999_999.0), 480);
        assert!(kept.len() <= 4 * 481, "{}", kept.len());
        assert!(kept.contains(&(512_345.0, 9.0)) && kept.contains(&(700_001.0, -9.0)));
        assert!(kept.is_sorted_by(|one, next| one.0 < next.0));
        assert!(drawn(Chart { curves: vec![curve(points)], ..Chart::default() }).len() < 60_000);
    }

    #[test]
    fn what_cannot_be_drawn_is_left_out() {
        let empty =
            Chart { curves: vec![curve([(0.0, f64::NAN)]), PlotCurve::default()], ..Chart::default() };
        assert!(empty.draw().is_none());
        for odd in [vec![(3.0, 0.0)], vec![(1.0, 5.0), (2.0, 5.0)], vec![(0.0, 1e300), (1.0, -1e300)]] {
            let svg = drawn(Chart { curves: vec![curve(odd.clone())], ..Chart::default() });
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{odd:?}: {svg}");
        }
        let wide = drawn(Chart { curves: vec![curve([(1.0, 1e-4), (2.0, 1.0)])], ..Chart::default() });
        assert!(wide.contains("0.001") && wide.contains("0.01"), "a logarithmic axis: {wide}");
    }

    #[test]
    fn a_curve_that_would_hide_another_is_dashed() {
        let of = |colour, offset: f64| PlotCurve {
            colour,
            ..curve((0..20).map(|step| (f64::from(step), 1.0 + f64::from(step) + offset)))
        };
        let lines = |second| {
            let chart = Chart { curves: vec![of(0, 0.0), second], ..Chart::default() };
            drawn(chart).matches("stroke=\"#D96B0B\"").count()
        };
        assert_eq!(lines(of(1, 3.0)), 1, "apart");
        assert!(lines(of(1, 0.0)) > 5, "the first shows between the dashes of the second");
    }

    #[test]
    fn areas_are_laid_on_one_another() {
        let mut chart =
            Chart { curves: vec![curve([(0.0, 1.0), (1.0, 2.0)]); 3], stacked: true, ..Chart::default() };
        chart.stack();
        assert_eq!(chart.curves[2].points, [(0.0, 3.0), (1.0, 6.0)]);
        assert_eq!(drawn(chart).matches("<polygon").count(), 3);
    }

    #[test]
    fn numbers_at_an_axis_are_short() {
        let shown = [0.0, 0.5, 1.25, 12.0, 0.0004, 250_000.0].map(number);
        assert_eq!(shown, ["0", "0.5", "1.25", "12", "4e-4", "2.5e5"]);
        assert_eq!([300.0, 12_000.0].map(|v| Unit::Steps.label(v)), ["300", "12k"]);
        assert_eq!([2.0, 2.5].map(|v| Unit::Things.label(v)), ["2", ""]);
        assert_eq!(Unit::Mebibytes.label(12.5), "12.5 MiB");
        assert_eq!(
            [0.0, 0.25, 90.0, 600.0].map(|v| Unit::Seconds.label(v)),
            ["0", "250 ms", "90 s", "10 min"]
        );
        assert_eq!(
            means(&[(0.0, 1.0), (1.0, 3.0), (2.0, f64::NAN), (3.0, 5.0)], 2),
            [(0.5, 2.0), (3.0, 5.0)]
        );
    }
}
