"""A simulated accelerator: a device of its own whose work is deferred, reordered, limited and watched.

.. code-block:: python

    with SimulatedAccelerator(order="copy_first") as sim:
        x = torch.ones(4, device=sim.device)
        print((x + 1).cpu())
        sim.check()
"""

from sidestream.testing.simulated.accelerator import ORDERS, RaceError, SimulatedAccelerator, SimulatedRuntime
from sidestream.testing.simulated.machine import Access, Event, Order, Race, Stream, TimeModel
from sidestream.testing.simulated.tensor import SimTensor

__all__ = [
    "ORDERS",
    "Access",
    "Event",
    "Order",
    "Race",
    "RaceError",
    "SimTensor",
    "SimulatedAccelerator",
    "SimulatedRuntime",
    "Stream",
    "TimeModel",
]
