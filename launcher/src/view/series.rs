//! A figure over the steps of a run.

/// Points that are kept; beyond, neighbours are drawn together.
const MOST: usize = 1 << 16;

/// Values by step, in order.
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<(f64, f64)>);

impl Series {
    /// Enters the value of a step. One that is there already is repeated: it and all after it are forgotten.
    pub fn push(&mut self, step: u64, value: f64) {
        let step = step as f64;
        while self.0.last().is_some_and(|(last, _)| *last >= step) {
            self.0.pop();
        }
        if value.is_finite() {
            self.0.push((step, value));
        }
        if self.0.len() >= MOST {
            self.0 = self.0.chunks(2).map(mean).collect();
        }
    }

    /// Enters the value of a step unless it, or a later one, is there already.
    pub fn extend(&mut self, step: u64, value: f64) {
        if self.0.last().is_none_or(|(last, _)| *last < step as f64) {
            self.push(step, value);
        }
    }

    /// At most `columns` points over the whole range, each the mean of what lies there.
    pub fn drawn(&self, columns: usize) -> Vec<(f64, f64)> {
        let (Some((first, _)), Some((last, _))) = (self.0.first(), self.0.last()) else { return Vec::new() };
        let width = ((last - first) / columns.max(1) as f64).max(f64::MIN_POSITIVE);
        let column =
            |point: &(f64, f64)| (((point.0 - first) / width) as usize).min(columns.saturating_sub(1));
        self.0.chunk_by(|one, next| column(one) == column(next)).map(mean).collect()
    }
}

fn mean(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len().max(1) as f64;
    let sum = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
    (sum.0 / count, sum.1 / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_is_repeated_takes_back_what_came_after_it() {
        let mut series = Series::default();
        (1..=5).for_each(|step| series.push(step, step as f64));
        series.push(3, 30.0);
        series.push(4, f64::NAN);
        series.extend(2, 9.0);
        assert_eq!(series.drawn(100), [(1.0, 1.0), (2.0, 2.0), (3.0, 30.0)]);
    }

    #[test]
    fn a_long_run_is_drawn_whole_and_kept_small() {
        let mut series = Series::default();
        (0..500_000).for_each(|step| series.push(step, 2.0));
        let drawn = series.drawn(80);
        assert!(series.0.len() < MOST && drawn.len() <= 80 && drawn.len() > 70, "{}", drawn.len());
        assert!(drawn.iter().all(|(_, value)| *value == 2.0));
        assert!(drawn[0].0 < 10_000.0 && drawn[drawn.len() - 1].0 > 490_000.0);
        assert!(Series::default().drawn(80).is_empty());
    }
}
