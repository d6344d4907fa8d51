"""What tests build on: strategies, conformance suites, fault-injecting parts, models. Not imported by the product."""
