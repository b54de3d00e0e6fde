//! Teams: numbering, splitting, ending.

use crate::world::{barrier, context, done, must, refused};
use phalanx::Comm;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("teams/predefined", predefined),
    Scenario::rank("teams/strided", strided),
    Scenario::rank("teams/two_dimensions", two_dimensions),
    Scenario::rank("teams/again_and_again", again),
];

fn predefined(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let world = context.world();
    assert_eq!((world.my_pe(), world.n_pes()), (me, pes));
    // One host.
    let node = must("node", context.node())?;
    assert_eq!((node.my_pe(), node.n_pes()), (me, pes));
    let shared = must("shared", context.shared())?;
    assert!(shared.n_pes() >= 1 && shared.my_pe() < shared.n_pes());
    let columns = must("same_pe_of_nodes", context.same_pe_of_nodes())?;
    assert_eq!((columns.my_pe(), columns.n_pes()), (0, 1));
    for pe in 0..pes {
        assert_eq!(must("translate_pe", world.translate_pe(pe, &node))?, Some(pe));
    }
    refused("no such PE", world.translate_pe(pes, &node), &["the team's PE", "does not exist"])?;
    must("sync", world.sync())?;
    must("barrier", node.barrier())?;
    barrier(&context)?;
    must("finalize", context.finalize())?;
    done()
}

fn strided(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let world = context.world();
    for (start, stride) in [(0, 1), (0, 2), (1, 2), (pes - 1, 1)] {
        if start >= pes {
            continue;
        }
        let size = (pes - start).div_ceil(stride);
        let team = must("split_strided", world.split_strided(start, stride, size))?;
        let number = me.checked_sub(start).filter(|n| n.is_multiple_of(stride)).map(|n| n / stride);
        assert_eq!(team.as_ref().map(|team| (team.my_pe(), team.n_pes())), number.map(|n| (n, size)));
        if let Some(team) = team {
            assert_eq!(must("translate_pe", team.translate_pe(0, &world))?, Some(start));
            assert_eq!(must("translate_pe", world.translate_pe(me, &team))?, Some(team.my_pe()));
            must("barrier", team.barrier())?;
            // A team of a team.
            let half = must("split_strided", team.split_strided(0, 1, size.div_ceil(2)))?;
            if let Some(half) = half {
                must("sync", half.sync())?;
                must("destroy", half.destroy())?;
            }
            must("destroy", team.destroy())?;
        }
        barrier(&context)?;
    }
    refused("beyond", world.split_strided(0, 1, pes + 1), &["does not exist"])?;
    refused("no stride", world.split_strided(0, 0, 1), &["stride"])?;
    refused("a stride that is no int", world.split_strided(0, 1 << 32, 1), &["4294967296", "2147483647"])?;
    refused("no size", world.split_strided(0, 1, 0), &["size"])?;
    must("finalize", context.finalize())?;
    done()
}

fn two_dimensions(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let world = context.world();
    for width in 1..=pes {
        let (row, column) = must("split_2d", world.split_2d(width))?;
        let (y, x) = (me / width, me % width);
        assert_eq!((row.my_pe(), row.n_pes()), (x, width.min(pes - y * width)), "row of {width}");
        assert_eq!((column.my_pe(), column.n_pes()), (y, (pes - x).div_ceil(width)), "column of {width}");
        must("barrier", row.barrier())?;
        must("barrier", column.barrier())?;
        must("destroy", row.destroy())?;
        must("destroy", column.destroy())?;
    }
    refused("no width", world.split_2d(0), &["width"])?;
    must("finalize", context.finalize())?;
    done()
}

/// More teams than there can be at a time, and one that is dropped.
fn again(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let world = context.world();
    for _ in 0..40 {
        let team = must("split_strided", world.split_strided(0, 1, context.n_pes()))?.ok_or("a member")?;
        must("destroy", team.destroy())?;
    }
    drop(must("split_strided", world.split_strided(0, 1, 1))?);
    barrier(&context)?;
    must("finalize", context.finalize())?;
    done()
}
