//! Tests of calls that are refused, and of rows without room.

use symmpool_allocator::Error;
use symmpool_collectives::{CombineAt, DType, DispatchAt, ExpertBuffer, ExpertLayout, ExpertShape};

use crate::model::RoutingModel;
use crate::{BY_RANK, ExpertQuantization, How, Rank, STREAM, ranks};

const SHAPE: ExpertShape = ExpertShape {
    hidden: 128,
    experts: 4,
    top_k: 2,
    max_tokens: 4,
    dtype: DType::Bf16,
    capacity: None,
};

fn routing(shape: ExpertShape, ids: [&[i64]; 2]) -> RoutingModel {
    RoutingModel { shape, ids: ids.map(<[i64]>::to_vec).to_vec(), seed: 3 }
}

#[test]
fn ids_that_are_no_experts_are_named_on_every_rank_and_count_as_none() {
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, SHAPE);
        let bad = routing(SHAPE, [&[0, 2, 1, 3], &[3, 1, 4, 0, -7, -1]]);
        let good = routing(SHAPE, [&[0, 2, 1, 3], &[3, 1, -1, 0, -1, -1]]);
        for by_expert in [None, Some(2)] {
            let handle = rank.handle(How { by_expert, ..BY_RANK });
            let error = rank.dispatch(&bad, 1, &handle, false).unwrap_err();
            assert!(error.is_invalid_argument() && error.ranks() == [1], "{error}");
            assert!(error.to_string().contains("token 1 of rank 1 names expert 4"), "{error}");
            rank.check_received(&bad, 1, &handle, false);
            rank.combine(&bad, 1, &handle, false);
            rank.dispatch(&good, 2, &handle, false).unwrap_or_else(|error| panic!("{error}"));
            rank.combine(&good, 2, &handle, false);
        }
    });
}

#[test]
fn rows_without_room_in_the_buffer_are_counted_and_do_not_come_back() {
    let shape = ExpertShape { capacity: Some(3), ..SHAPE };
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, shape);
        let many = routing(shape, [&[0, 2, 1, 1, 0, -1], &[3, 1, 2, 0, 1, -1]]);
        for by_expert in [None, Some(4)] {
            let handle = rank.handle(How { by_expert, ..BY_RANK });
            let error = rank.dispatch(&many, 1, &handle, false).unwrap_err();
            assert!(error.is_overflow() && error.ranks() == [0], "{error}");
            let text = error.to_string();
            assert!(text.contains("rank 0 was sent 6 rows") && text.contains("for 3"), "{text}");
            rank.check_received(&many, 1, &handle, false);
            rank.combine(&many, 1, &handle, false);
            rank.dispatch(&many, 2, &handle, true).unwrap();
            rank.check_received(&many, 2, &handle, true);
        }
    });
}

#[test]
fn rows_by_expert_without_room_in_the_output_are_not_written() {
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, SHAPE);
        let many = routing(SHAPE, [&[0, 1, 0, 1, 0, 1, 2, 3], &[0, 1, 0, 1, 0, 1, 0, 1]]);
        let how = How { by_expert: Some(1), missing: 4, ..BY_RANK };
        let handle = rank.handle(how);
        assert_eq!(handle.room, 12);
        let error = rank.dispatch(&many, 1, &handle, false).unwrap_err();
        assert!(error.is_overflow() && error.ranks() == [0], "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 0 was sent 14 rows") && text.contains("for 12"), "{text}");
        rank.check_received(&many, 1, &handle, false);
        let counts = rank.numbers(&handle, |parts| parts.expert_counts);
        assert_eq!(counts[..2], if rank.me == 0 { [7, 5] } else { [1, 1] });
        let few = routing(SHAPE, [&[0, 1, 0, 1, 0, 1, 2, 3], &[0, 1, 0, 1]]);
        rank.dispatch(&few, 2, &handle, false).unwrap();
        rank.combine(&few, 2, &handle, true);
    });
}

#[test]
fn tokens_that_are_quantised_already_travel_with_their_scales() {
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, SHAPE);
        let me = rank.me as u8;
        let handle = rank.handle(BY_RANK);
        let input = rank.block(&[[10 + me; 128], [20 + me; 128]].concat());
        let scales = rank.block(&[1 + me, 2, 3, 11 + me, 12, 13]);
        let ids = [[0_i32, 2], [3, -1]].concat();
        let ids = rank.block(&ids.iter().flat_map(|id| id.to_ne_bytes()).collect::<Vec<_>>());
        let dispatch = DispatchAt {
            input: input.as_ptr(),
            quantized: true,
            scales: scales.as_ptr(),
            scale_bytes: 3,
            scale_dtype: DType::U8,
            tokens: 2,
            ids: ids.as_ptr(),
            ids_dtype: DType::I32,
            weights: std::ptr::null(),
            quantize: ExpertQuantization::None,
            layout: ExpertLayout::ByRank,
            known: false,
            more: 0,
        };
        // SAFETY: the blocks have these lengths.
        unsafe { rank.buffer.dispatch_at(handle.memory.as_ptr(), &dispatch, STREAM) }.unwrap();
        let received = rank.buffer.received();
        let rows = rank.received_bytes(received.rows, 4 * 128);
        let scales = rank.received_bytes(received.scales, 12);
        if me == 0 {
            assert_eq!(rows[..256], [[10; 128], [11; 128]].concat());
            assert_eq!(scales[..6], [1, 2, 3, 2, 2, 3]);
        } else {
            assert_eq!(rows, [[10; 128], [20; 128], [11; 128], [21; 128]].concat());
            assert_eq!(scales, [1, 2, 3, 11, 12, 13, 2, 2, 3, 12, 12, 13]);
        }
    });
}

#[test]
fn ranks_that_call_otherwise_are_named_and_the_communicator_stays_usable() {
    ranks(2, |pool, comm| {
        let me = pool.rank() as usize;
        let routing = routing(SHAPE, [&[0, 2], &[3, 1]]);
        let other = ExpertShape { top_k: 2, experts: 8, ..SHAPE };
        let (same, mine) =
            (Rank::new(pool, comm, SHAPE), Rank::new(pool, comm, [SHAPE, other][me]));
        let otherwise = How { by_expert: (me == 1).then_some(1), ..BY_RANK };
        type Wrong<'a> = (&'a str, &'a dyn Fn() -> Result<(), Error>);
        let wrong: [Wrong<'_>; 3] = [
            ("8 experts", &|| mine.dispatch(&routing, 1, &mine.handle(BY_RANK), false)),
            ("rows by expert", &|| same.dispatch(&routing, 1, &same.handle(otherwise), false)),
            ("rank 0: barrier", &|| match me {
                0 => comm.barrier(STREAM),
                _ => same.dispatch(&routing, 1, &same.handle(BY_RANK), false),
            }),
        ];
        for (what, call) in wrong {
            let error = call().unwrap_err();
            assert!(error.is_diverged() && error.to_string().contains(what), "{what}: {error}");
            assert!(error.to_string().contains("dispatch to experts of bf16"), "{error}");
            let handle = same.handle(BY_RANK);
            same.dispatch(&routing, 2, &handle, false).unwrap();
            same.check_received(&routing, 2, &handle, false);
            same.combine(&routing, 2, &handle, false);
        }
    });
}

#[test]
fn invalid_arguments_are_refused_and_an_error_on_the_others() {
    ranks(2, |pool, comm| {
        for (shape, what) in [
            (ExpertShape { hidden: 4, ..SHAPE }, "hidden=4"),
            (ExpertShape { experts: 3, ..SHAPE }, "experts=3"),
            (ExpertShape { top_k: 0, ..SHAPE }, "top_k=0"),
            (ExpertShape { max_tokens: 0, ..SHAPE }, "max_tokens=0"),
            (ExpertShape { capacity: Some(9), ..SHAPE }, "capacity=9"),
            (ExpertShape { dtype: DType::I32, ..SHAPE }, "elements of i32"),
        ] {
            let error = ExpertBuffer::new(comm, shape, None).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(what), "{error}");
        }
        let rank = Rank::new(pool, comm, SHAPE);
        let routing = routing(SHAPE, [&[0, 2], &[3, 1, 2, 2]]);
        let handle = rank.handle(BY_RANK);
        rank.dispatch(&routing, 1, &handle, false).unwrap();
        let block = rank.block(&[0; 8 * 256]);
        let good = DispatchAt {
            input: block.as_ptr(),
            quantized: false,
            scales: std::ptr::null(),
            scale_bytes: 0,
            scale_dtype: DType::U8,
            tokens: 1 + rank.me,
            ids: block.as_ptr(),
            ids_dtype: DType::I64,
            weights: std::ptr::null(),
            quantize: ExpertQuantization::None,
            layout: ExpertLayout::ByRank,
            known: false,
            more: 0,
        };
        let odd = block.as_ptr().wrapping_add(1);
        let good_combine = CombineAt {
            input: block.as_ptr(),
            input_rows: usize::MAX,
            output: block.as_ptr().wrapping_add(1024),
            tokens: 1 + rank.me,
            weights: std::ptr::null(),
            by_expert: false,
            more: 0,
        };
        let by_expert = |output, alignment| ExpertLayout::ByExpert {
            output,
            scales: std::ptr::null_mut(),
            capacity: 1,
            alignment,
        };
        let packed = |rows| ExpertLayout::Packed {
            output: block.as_ptr(),
            scales: std::ptr::null_mut(),
            rows,
        };
        let wrong = [
            ("no rows for each expert", DispatchAt { layout: packed(0), ..good }),
            ("with the routing of a handle", DispatchAt { layout: packed(1), known: true, ..good }),
            ("5 tokens", DispatchAt { tokens: 5, ..good }),
            ("no tokens", DispatchAt { input: std::ptr::null(), ..good }),
            ("tokens at", DispatchAt { input: odd, ..good }),
            ("ids of f32", DispatchAt { ids_dtype: DType::F32, ..good }),
            (
                "Fp8 of tokens",
                DispatchAt { quantized: true, quantize: ExpertQuantization::Fp8, ..good },
            ),
            ("5 bytes of scales", DispatchAt { scale_bytes: 5, ..good }),
            ("alignment=0", DispatchAt { layout: by_expert(block.as_ptr(), 0), ..good }),
            ("an output at", DispatchAt { layout: by_expert(odd, 1), ..good }),
            ("4 tokens with a handle of 2", DispatchAt { known: true, tokens: 4, ..good }),
        ];
        let at = handle.memory.as_ptr();
        // SAFETY: where arguments are not refused, which is what is tested, the block is long enough.
        let dispatch =
            |dispatch: &DispatchAt| unsafe { rank.buffer.dispatch_at(at, dispatch, STREAM) };
        // SAFETY: where arguments are not refused, which is what is tested, the block is long enough.
        let combine = |combine: &CombineAt| unsafe { rank.buffer.combine_at(at, combine, STREAM) };
        let check = |what: &str, error: Error| {
            assert_eq!(error.is_invalid_argument(), rank.me == 1, "{what}: {error}");
            assert_eq!(error.is_diverged(), rank.me == 0, "{what}: {error}");
            assert!(rank.me == 0 || error.to_string().contains(what), "{what}: {error}");
        };
        for (what, bad) in wrong {
            check(what, dispatch(if rank.me == 1 { &bad } else { &good }).unwrap_err());
        }
        let good = good_combine;
        let wrong = [
            ("input at", CombineAt { input: odd, ..good }),
            ("weights for rows by rank", CombineAt { weights: block.as_ptr().cast(), ..good }),
            ("3 tokens with a handle of 2", CombineAt { tokens: 3, ..good }),
        ];
        for (what, bad) in wrong {
            check(what, combine(if rank.me == 1 { &bad } else { &good }).unwrap_err());
        }
        rank.dispatch(&routing, 1, &handle, false).unwrap();
        rank.combine(&routing, 1, &handle, false);
    });
}
