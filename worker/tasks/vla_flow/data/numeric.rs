//! Numbers that the model sees: one feature, or several side by side.

use coxswain_data::{
    DataError, NormMode, Normalizer,
    lerobot::{
        Catalog,
        info::Info,
        rows::{Block, Columns},
        stats::{FeatureStats, Stats},
    },
};

/// Numbers that the model sees: one feature, or several side by side.
pub(super) struct Numeric {
    /// The name in statistics and `policy.json`: of several features their names with ` + ` between.
    pub(super) name: String,
    /// The features, in their order; none where the model sees no such numbers.
    pub(super) parts: Vec<FeatureColumn>,
    /// Values of one frame.
    pub(super) width: usize,
    pub(super) normalizer: Normalizer,
}

/// One feature of the data set.
pub(super) struct FeatureColumn {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Names of its elements, where the data set has them.
    names: Vec<String>,
    /// The feature's place among the columns of a numeric block.
    place: usize,
}

impl FeatureColumn {
    fn width(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Numeric {
    /// The features that `data.<key>` names, added to the columns that are read.
    pub(super) fn from_catalog(
        catalog: &Catalog,
        columns: &mut Columns,
        key: &'static str,
        names: &[String],
        mode: NormMode,
    ) -> Result<Self, DataError> {
        let (mut parts, mut normalizers) = (Vec::new(), Vec::new());
        for name in names {
            let part = FeatureColumn {
                place: columns.numbers.len(),
                ..FeatureColumn::from_info(&catalog.info, key, name)?
            };
            normalizers.push((Normalizer::new(catalog, name, part.width(), mode)?, part.width()));
            columns.numbers.push((name.clone(), part.shape.clone()));
            parts.push(part);
        }
        let (name, width) = (names.join(" + "), parts.iter().map(FeatureColumn::width).sum());
        Ok(Self { name, parts, width, normalizer: Normalizer::side_by_side(mode, normalizers) })
    }

    /// Values of one frame of the features that `data.<key>` names.
    pub(super) fn width(info: &Info, key: &'static str, names: &[String]) -> Result<usize, DataError> {
        names.iter().map(|name| Ok(FeatureColumn::from_info(info, key, name)?.width())).sum()
    }

    /// Names of its elements; none unless the data set has one for each.
    pub(super) fn element_names(&self) -> Vec<String> {
        let names: Vec<_> = self.parts.iter().flat_map(|part| part.names.iter().cloned()).collect();
        if names.len() == self.width { names } else { Vec::new() }
    }

    /// Whether the model sees no such numbers.
    pub(super) fn is_none(&self) -> bool {
        self.parts.is_empty()
    }

    /// Whether a feature of this name is among them.
    pub(super) fn has(&self, feature: &str) -> bool {
        self.parts.iter().any(|part| part.name == feature)
    }

    /// Statistics by [`Numeric::name`]: those of its features, side by side.
    pub(super) fn stats(&self, stats: &Stats) -> Option<FeatureStats> {
        stats.side_by_side(self.parts.iter().map(|part| (part.name.as_str(), part.width())))
    }

    /// Appends the values of a row that `block` holds, as recorded. Returns the first that is no finite
    /// number, if there is one: its feature, its place there, and what it is.
    pub(super) fn append(&self, block: &Block, row: u64, out: &mut Vec<f32>) -> Option<(&str, usize, f32)> {
        let mut odd = None;
        for part in &self.parts {
            let width = part.width();
            let from = (row - block.first_row) as usize * width;
            let values = &block.numbers[part.place][from..from + width];
            let first = values.iter().position(|value| !value.is_finite());
            odd = odd.or_else(|| first.map(|at| (part.name.as_str(), at, values[at])));
            out.extend_from_slice(values);
        }
        odd
    }
}

impl FeatureColumn {
    fn from_info(info: &Info, key: &'static str, name: &str) -> Result<Self, DataError> {
        let feature = info.require(key, name, |f| f.is_number() && f.width() > 0)?;
        let (shape, names) = (feature.shape.clone(), feature.element_names());
        Ok(Self { name: name.to_owned(), shape, names, place: 0 })
    }
}
