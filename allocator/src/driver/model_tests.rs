//! Random sequences of calls, sensible and not, against a model so plain that it is right.

use proptest::prelude::*;

use super::{Driver, Physical, Reservation, SimDriver};

const UNITS: u64 = 24;

#[derive(Clone, Debug)]
enum DriverOp {
    Create(u64),
    Share(usize),
    Release(usize),
    Map {
        physical: usize,
        offset: u64,
        odd: bool,
    },
    Unmap {
        offset: u64,
        units: u64,
        odd: bool,
    },
    /// Unmaps something that is mapped.
    UnmapMapped(usize),
}

fn op() -> impl Strategy<Value = DriverOp> {
    let any_index = 0usize..64;
    prop_oneof![
        2 => (0u64..4).prop_map(DriverOp::Create),
        1 => any_index.clone().prop_map(DriverOp::Share),
        1 => any_index.clone().prop_map(DriverOp::Release),
        5 => (any_index.clone(), 0..UNITS + 2, prop::bool::weighted(0.05))
            .prop_map(|(physical, offset, odd)| DriverOp::Map { physical, offset, odd }),
        2 => (0..UNITS + 2, 0u64..4, prop::bool::weighted(0.05))
            .prop_map(|(offset, units, odd)| DriverOp::Unmap { offset, units, odd }),
        2 => any_index.prop_map(DriverOp::UnmapMapped),
    ]
}

/// Which unit of the reservation belongs to which mapping: `(first unit, units)`.
type Model = Vec<Option<(u64, u64)>>;

fn check(driver: &Driver, ops: Vec<DriverOp>) -> Result<(), TestCaseError> {
    let unit = driver.granularity();
    let range: Reservation = driver.reserve(UNITS * unit, unit).unwrap();
    let mut model: Model = vec![None; UNITS as usize];
    let mut physicals: Vec<Physical> = Vec::new();
    for op in ops {
        let pick = |index: usize, len: usize| (len > 0).then(|| index % len.max(1));
        match op {
            DriverOp::Create(units) => match driver.create(units * unit) {
                Ok(physical) => {
                    prop_assert!(units > 0);
                    physicals.push(physical);
                }
                Err(error) => prop_assert!(units == 0 && error.is_invalid_argument(), "{}", error),
            },
            DriverOp::Share(index) => {
                if let Some(i) = pick(index, physicals.len()) {
                    let exported = driver.export(&physicals[i]).unwrap();
                    physicals.push(driver.import(exported, physicals[i].bytes()).unwrap());
                }
            }
            DriverOp::Release(index) => {
                if let Some(i) = pick(index, physicals.len()) {
                    driver.release(physicals.swap_remove(i)).unwrap();
                }
            }
            DriverOp::Map { physical, offset, odd } => {
                let Some(i) = pick(physical, physicals.len()) else { continue };
                let units = physicals[i].bytes() / unit;
                let fits = offset + units <= UNITS;
                let right =
                    !odd && fits && (offset..offset + units).all(|u| model[u as usize].is_none());
                let result = driver.map(&range, offset * unit + u64::from(odd), &physicals[i]);
                prop_assert_eq!(result.is_ok(), right, "{:?}", result);
                if right {
                    model[offset as usize..(offset + units) as usize].fill(Some((offset, units)));
                }
            }
            DriverOp::Unmap { offset, units, odd } => {
                unmap(driver, &range, &mut model, (offset, units), odd)?;
            }
            DriverOp::UnmapMapped(index) => {
                let mapped: Vec<_> = model.iter().flatten().copied().collect();
                if let Some(i) = pick(index, mapped.len()) {
                    unmap(driver, &range, &mut model, mapped[i], false)?;
                }
            }
        }
    }
    while let Some(&mapping) = model.iter().flatten().next() {
        unmap(driver, &range, &mut model, mapping, false)?;
    }
    for physical in physicals {
        driver.release(physical).unwrap();
    }
    driver.unreserve(range).unwrap();
    Ok(())
}

fn unmap(
    driver: &Driver,
    range: &Reservation,
    model: &mut Model,
    (offset, units): (u64, u64),
    odd: bool,
) -> Result<(), TestCaseError> {
    let unit = driver.granularity();
    let whole = model.get(offset as usize).is_some_and(|m| *m == Some((offset, units)));
    let result = driver.unmap(range, offset * unit + u64::from(odd), units * unit);
    prop_assert_eq!(result.is_ok(), whole && !odd, "{:?}", result);
    match result {
        Ok(()) => model[offset as usize..(offset + units) as usize].fill(None),
        Err(error) => prop_assert!(error.is_invalid_argument(), "{}", error),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

    #[test]
    fn sim_agrees_with_the_model(ops in prop::collection::vec(op(), 1..120), seed: u64) {
        check(&Driver::new(SimDriver::new(seed)), ops)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    #[test]
    fn host_agrees_with_the_model(ops in prop::collection::vec(op(), 1..60)) {
        check(&Driver::host().unwrap(), ops)?;
    }
}
