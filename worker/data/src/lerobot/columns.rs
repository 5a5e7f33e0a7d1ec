//! From Arrow arrays to flat numbers and encoded images, with every row's shape checked.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Int64Type};

/// A row that does not have the shape that `info.json` promises.
#[derive(Debug, PartialEq, Eq)]
pub struct RowFault {
    /// Row within the array.
    pub row: usize,
    /// What is wrong.
    pub fault: String,
}

/// All rows of `column` as `rows * product(shape)` numbers. A feature of shape `[1]` may be stored without a list.
pub fn numbers(column: &ArrayRef, shape: &[usize]) -> Result<Vec<f32>, RowFault> {
    let rows = column.len();
    let (mut level, mut per_row) = (column.clone(), 1usize);
    for (depth, &axis) in shape.iter().enumerate() {
        let Some(items) = list_items(&level, axis).map_err(|(item, found)| RowFault {
            row: item / per_row,
            fault: format!("axis {depth} has {found} elements, info.json says {axis}"),
        })?
        else {
            let rest: usize = shape[depth..].iter().product();
            if rest == 1 {
                break;
            }
            let fault = format!("stored as {}, info.json says shape {shape:?}", column.data_type());
            return Err(RowFault { row: 0, fault });
        };
        level = items;
        per_row *= axis;
    }
    if level.null_count() > 0 {
        let item = (0..level.len()).find(|i| level.is_null(*i)).unwrap_or(0);
        return Err(RowFault { row: item / per_row.max(1), fault: "a value is missing (null)".into() });
    }
    let floats = cast(&level, &DataType::Float32)
        .map_err(|_| RowFault { row: 0, fault: format!("stored as {}, not numbers", level.data_type()) })?;
    let values = floats.as_primitive_opt::<Float32Type>().map(|a| a.values().to_vec()).unwrap_or_default();
    if values.len() != rows * shape.iter().product::<usize>() {
        let fault = format!("{} numbers in {rows} rows, info.json says shape {shape:?}", values.len());
        return Err(RowFault { row: 0, fault });
    }
    Ok(values)
}

/// All rows of an integer column.
pub fn integers(column: &ArrayRef) -> Result<Vec<i64>, RowFault> {
    let ints = cast(column, &DataType::Int64)
        .map_err(|_| RowFault { row: 0, fault: format!("stored as {}, not integers", column.data_type()) })?;
    if let Some(row) = (0..ints.len()).find(|i| ints.is_null(*i)) {
        return Err(RowFault { row, fault: "missing (null)".into() });
    }
    Ok(ints.as_primitive_opt::<Int64Type>().map(|a| a.values().to_vec()).unwrap_or_default())
}

/// The encoded images of an image column: LeRobot stores a struct of `bytes` and `path`, others the bytes alone.
pub fn images(column: &ArrayRef) -> Result<ArrayRef, RowFault> {
    let bytes = match column.as_struct_opt() {
        Some(fields) => fields.column_by_name("bytes").cloned(),
        None => Some(column.clone()),
    };
    let is_binary = |a: &ArrayRef| matches!(a.data_type(), DataType::Binary | DataType::LargeBinary);
    let fault =
        || format!("stored as {}, expected encoded image bytes; re-export the data set", column.data_type());
    bytes.filter(is_binary).ok_or_else(|| RowFault { row: 0, fault: fault() })
}

/// The items of a list array whose every list has `axis` of them; `None` if it is no list array.
/// The error names the first list that has another number.
fn list_items(array: &ArrayRef, axis: usize) -> Result<Option<ArrayRef>, (usize, usize)> {
    if let Some(list) = array.as_fixed_size_list_opt() {
        return match list.value_length() as usize == axis {
            true => Ok(Some(list.values().clone())),
            false => Err((0, list.value_length() as usize)),
        };
    }
    let offsets: Vec<usize> = match array.data_type() {
        DataType::List(_) => array.as_list::<i32>().offsets().iter().map(|o| *o as usize).collect(),
        DataType::LargeList(_) => array.as_list::<i64>().offsets().iter().map(|o| *o as usize).collect(),
        _ => return Ok(None),
    };
    if let Some(item) = offsets.windows(2).position(|w| w[1] - w[0] != axis) {
        return Err((item, offsets[item + 1] - offsets[item]));
    }
    let values = match array.data_type() {
        DataType::List(_) => array.as_list::<i32>().values().clone(),
        _ => array.as_list::<i64>().values().clone(),
    };
    let (from, to) = (offsets[0], offsets[offsets.len() - 1]);
    Ok(Some(values.slice(from, to - from)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Float64Array, Int32Array, ListBuilder, PrimitiveBuilder};
    use arrow::datatypes::Float32Type;

    use super::*;

    fn nested(rows: &[&[&[f32]]]) -> ArrayRef {
        let inner = ListBuilder::new(PrimitiveBuilder::<Float32Type>::new());
        let mut outer = ListBuilder::new(inner);
        for row in rows {
            for list in *row {
                outer.values().values().append_slice(list);
                outer.values().append(true);
            }
            outer.append(true);
        }
        Arc::new(outer.finish())
    }

    #[test]
    fn nested_lists_flatten_row_by_row() {
        let column = nested(&[&[&[1.0, 2.0], &[3.0, 4.0]], &[&[5.0, 6.0], &[7.0, 8.0]]]);
        assert_eq!(numbers(&column, &[2, 2]).unwrap(), [1., 2., 3., 4., 5., 6., 7., 8.]);
        assert_eq!(numbers(&column.slice(1, 1), &[2, 2]).unwrap(), [5., 6., 7., 8.]);
    }

    #[test]
    fn a_row_of_another_shape_is_named() {
        let column = nested(&[&[&[1.0, 2.0], &[3.0, 4.0]], &[&[5.0, 6.0], &[7.0]]]);
        let fault = numbers(&column, &[2, 2]).unwrap_err();
        assert_eq!((fault.row, fault.fault.as_str()), (1, "axis 1 has 1 elements, info.json says 2"));
    }

    #[test]
    fn scalars_and_doubles_are_accepted_and_nulls_are_not() {
        let doubles: ArrayRef = Arc::new(Float64Array::from(vec![1.5, -2.0]));
        assert_eq!(numbers(&doubles, &[1]).unwrap(), [1.5, -2.0]);
        assert!(numbers(&doubles, &[2]).is_err());
        let nulls: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None]));
        assert_eq!(numbers(&nulls, &[1]).unwrap_err().row, 1);
        assert_eq!(integers(&nulls).unwrap_err().row, 1);
    }
}
